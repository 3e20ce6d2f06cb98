"""FlashAttention-2 on the GPU: an autograd Function over the Triton kernels of `cs336_systems.kernels`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from . import ops
from .choose import ARGUMENTS, Explanation, Implementation, spec_for
from .derivatives import differentiable_once
from .precision import autocast_inputs
from .spec import AttentionSpec


def kernels_of(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str:
    """Which kernels compute a call, in words, and why not those for Hopper."""
    return "the portable kernels"


def with_kernels(explanation: Explanation, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Explanation:
    """The same explanation, which says of these which of them compute the call."""
    if explanation.choice is not Implementation.FLASH:
        return explanation
    return dataclasses.replace(explanation, kernels=kernels_of(q, k, v, spec))


class FlashAttentionFunction(torch.autograd.Function):
    """The Triton kernels as an autograd Function: ``FlashAttentionFunction.apply(q, k, v, is_causal)``.

    q is (batch, q_len, d) or (*batch, q_heads, q_len, d). Saves q, k, v, the output and one float32 a row, the
    log-sum-exp: nothing quadratic, and no copies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool | str | AttentionSpec = False,
        scale: float | None = None,
        return_lse: bool = False,
        *extras: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The arguments are `attention`'s; ``is_causal`` may also be a spec, which is taken as validated.

        Then ``extras`` are the tensors that it asks for, in the order of `pairs.Extras`.
        """
        q, k, v = autocast_inputs(q, k, v)
        spec = ctx.spec = spec_for(Implementation.FLASH, q, k, v, is_causal, scale, return_lse)
        out, lse = ops.flash_forward(q, k, v, *spec.operands, extras)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        return (out, lse) if return_lse else out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and those extras that need one; None for the other arguments."""
        q, k, v, out, lse, *extras = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        spec: AttentionSpec = ctx.spec
        wanted = [position for position, needed in enumerate(ctx.needs_input_grad[ARGUMENTS:]) if needed]
        *gradients, of_extras = ops.flash_backward(q, k, v, out, lse, dout, dlse, *spec.operands, extras, wanted)
        all_of_extras: list[Tensor | None] = [None] * len(extras)
        for position, gradient in zip(wanted, of_extras, strict=True):
            all_of_extras[position] = gradient
        return *gradients, None, None, None, *all_of_extras
