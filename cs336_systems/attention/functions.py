"""FlashAttention-2 as autograd Functions, called as course code does: ``FlashAttentionFunction.apply(q, k, v, True)``.

q is (batch, q_len, d) or (*batch, q_heads, q_len, d). They save q, k, v, the output and one number a row, the
log-sum-exp: nothing quadratic, and no copies.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.call import NO_AUX, Aux, AuxLayout, Call, Gradients, Options, Wanted
from ..kernels.torch_names import must_dispatch
from . import op
from .call import Arguments, make_call
from .derivatives import differentiable_once
from .precision import autocast_inputs
from .transforms import transformed
from .validation import shape_of

NUM_ARGUMENTS = 8
"""Arguments of the Functions before the auxiliary tensors that have gradients."""


class Plan(Protocol):
    """What computes calls with the same metadata."""

    @property
    def options(self) -> Options:
        """The options of the calls."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """out and log-sum-exp."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux,
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        """The gradients from those of out and, unless None, of the log-sum-exp."""


class TracedPlan:
    """A plan that calls the operators of an implementation, which tracers and dispatch modes see."""

    def __init__(self, implementation: str, options: Options) -> None:
        self.implementation = implementation
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """See `Plan`."""
        call = Call(q, k, v, self.options, aux)
        return transformed(self.implementation, call) if op.transforming() else op.forward(self.implementation, call)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux,
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        """See `Plan`."""
        return op.backward(self.implementation, Call(q, k, v, self.options, aux), out, lse, dout, dlse, wanted)


def _forward(
    ctx: Any, implementation: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool | str, scale: float | None,
    return_lse: bool, plan: Plan | None, aux: Aux,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if plan is None:
        q, k, v = autocast_inputs(q, k, v)
        plan = _plan_of(implementation, q, k, v, Arguments(is_causal, scale=scale, return_lse=return_lse))
    out, lse = plan.forward(q, k, v, aux)
    ctx.set_materialize_grads(False)
    if aux is NO_AUX:
        ctx.plan = plan, None
        ctx.save_for_backward(q, k, v, out, lse)
    else:
        ctx.plan = plan, AuxLayout.of(aux)
        ctx.save_for_backward(q, k, v, out, lse, *aux.tensors)
    return (out, lse) if return_lse else out


def _plan_of(implementation: str, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> Plan:
    """The plan of a call made on a Function itself."""
    from . import dispatch  # which imports the Functions

    call = make_call(q, k, v, arguments)
    if q.ndim < 3:
        raise ValueError(f"q must have at least 3 dimensions (batch, length, head_dim); got {shape_of(q)}")
    with torch.enable_grad():  # which a Function's forward turns off
        return dispatch.differentiable_plan(dispatch.choose(call, implementation), call)


def _backward(ctx: Any, implementation: str, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    plan, layout = ctx.plan
    if must_dispatch(q, dout):  # compiled autograd, a mode
        plan = TracedPlan(implementation, plan.options)
    if layout is None:
        dq, dk, dv, _, _ = plan.backward(q, k, v, out, lse, dout, dlse, NO_AUX, NO_WANTED)
        return dq, dk, dv, *NO_GRADIENTS
    aux = layout.restore(tensors)
    needed = ctx.needs_input_grad[NUM_ARGUMENTS:]
    has_sinks = aux.sinks is not None
    wanted = Wanted(has_sinks and needed[0], needed[has_sinks:])
    dq, dk, dv, sinks, score_aux = plan.backward(q, k, v, out, lse, dout, dlse, aux, wanted)
    return dq, dk, dv, *NO_GRADIENTS, *([sinks] if has_sinks else []), *score_aux


NO_WANTED = Wanted()
NO_GRADIENTS = (None,) * (NUM_ARGUMENTS - 3)


class FlashAttentionFunction(torch.autograd.Function):
    """The Triton and Gluon kernels."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool | str = False, scale: float | None = None,
        return_lse: bool = False, plan: Plan | None = None, aux: Aux = NO_AUX, *differentiable: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The arguments are `attention`'s. ``plan`` and the rest are for `attention` itself.

        ``differentiable`` are the sinks, if there are any, and score_aux of ``aux``: autograd sees arguments alone.
        """
        return _forward(ctx, "flash", q, k, v, is_causal, scale, return_lse, plan, aux)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and ``differentiable``; None for the other arguments."""
        return _backward(ctx, "flash", dout, dlse)


class TiledAttentionFunction(torch.autograd.Function):
    """FlashAttention-2 in plain PyTorch operations (`tiled`)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool | str = False, scale: float | None = None,
        return_lse: bool = False, plan: Plan | None = None, aux: Aux = NO_AUX, *differentiable: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """The arguments are those of `FlashAttentionFunction`."""
        return _forward(ctx, "tiled", q, k, v, is_causal, scale, return_lse, plan, aux)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and ``differentiable``; None for the other arguments."""
        return _backward(ctx, "tiled", dout, dlse)
