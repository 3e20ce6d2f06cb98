"""Attention under torch.func: grad, vjp, jacrev and vmap, and their compositions.

torch.func takes neither the Functions of `functions`, which keep the log-sum-exp without returning it, nor the gradient
formula of an operator. These Functions return all that they keep, and call the operators, which have vmap rules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.call import AuxLayout, Call, Options, Wanted
from . import op
from .derivatives import TWICE

FORWARD_MODE = "this implementation of attention has no forward-mode derivatives; impl='naive' has"
NUM_ARGUMENTS = 3
"""Arguments of `_Forward` before its tensors."""


class _Backward(torch.autograd.Function):
    """The gradients of q, k and v, and those wanted; they cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        implementation: str, options: Options, layout: AuxLayout, wanted: Wanted, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, out, lse, dout, dlse, *aux = tensors
        call = Call(q, k, v, options, layout.restore(aux))
        dq, dk, dv, sinks, score_aux = op.backward(implementation, call, out, lse, dout, dlse, wanted)
        return dq, dk, dv, *[x for x in (sinks, *score_aux) if x is not None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise RuntimeError(FORWARD_MODE)


class _Forward(torch.autograd.Function):
    """out and the log-sum-exp."""

    generate_vmap_rule = True

    @staticmethod
    def forward(implementation: str, options: Options, layout: AuxLayout, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *aux = tensors
        return op.forward(implementation, Call(q, k, v, options, layout.restore(aux)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *ctx.arguments, ctx.layout = inputs[:NUM_ARGUMENTS]
        ctx.save_for_backward(*output, *inputs[NUM_ARGUMENTS:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, q, k, v, *aux = ctx.saved_tensors
        needed = ctx.needs_input_grad[NUM_ARGUMENTS + 3 :]
        first = len(needed) - ctx.layout.num_score_aux(len(aux))
        wanted = Wanted(ctx.layout.given[0] and needed[0], needed[first:])
        arguments = *ctx.arguments, ctx.layout, wanted
        dq, dk, dv, *others = _Backward.apply(*arguments, q, k, v, out, lse, dout, dlse, *aux)
        sinks, score_aux = op.unflatten(others, wanted)
        between = [None] * (first - ctx.layout.given[0])
        return *[None] * NUM_ARGUMENTS, dq, dk, dv, *[sinks] * ctx.layout.given[0], *between, *score_aux

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise RuntimeError(FORWARD_MODE)


def transformed(implementation: str, call: Call) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp by the operators of an implementation, "flash" or "tiled"."""
    arguments = implementation, call.options, AuxLayout.of(call.aux)
    return _Forward.apply(*arguments, call.q, call.k, call.v, *call.aux.tensors)
