"""How often autograd Functions can be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.torch_names import is_batch_of_autograd

Backward = Callable[..., Any]

TWICE = "this implementation of attention cannot be differentiated twice; impl='naive' can"

BATCHED = (
    "this Function takes no batch of gradients, as is_grads_batched=True of torch.autograd.grad and vectorize=True of "
    "torch.autograd.functional make it; use torch.vmap of what torch.func.vjp returns, or torch.func.jacrev"
)


class _Undifferentiable(torch.autograd.Function):
    """Passes a gradient on, and raises where that gradient is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, message: str, *causes: Tensor | None) -> Tensor:
        ctx.message = message
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(ctx.message)


def differentiable_once(backward: Backward, message: str = TWICE) -> Backward:
    """A Function's backward whose results raise RuntimeError, with this message, where they are differentiated again.

    It says what to do where it gets a batch of gradients, whose elements neither kernels nor views can reach.

    torch's own ``once_differentiable`` takes the results for constants when the incoming gradient is one, as that of a
    sum is, though they depend on the Function's inputs all the same.
    """

    def once(ctx: Any, *gradients: Any) -> Any:
        try:
            return backward(ctx, *gradients)
        except RuntimeError as error:
            if any(gradient is not None and is_batch_of_autograd(gradient) for gradient in gradients):
                raise RuntimeError(BATCHED) from error
            raise

    @functools.wraps(backward)
    def guarded(ctx: Any, *gradients: Any) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return once(ctx, *gradients)
        with torch.no_grad():
            results = once(ctx, *gradients)
        causes = (*gradients, *ctx.saved_tensors)
        return tuple(
            None if result is None else _Undifferentiable.apply(result, message, *causes) for result in results
        )

    return guarded
