"""Attention under torch.func: grad, vjp, jacrev and vmap, and what they make of one another.

The Functions of `flash` and `tiled` keep the log-sum-exp without returning it, which torch.func does not take. These
return it, and are made of the operators, which have rules for vmap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .derivatives import TWICE
from .spec import AttentionSpec

FORWARD_MODE = "this implementation of attention has no forward-mode derivatives; impl='naive' has"
_ARGUMENTS = 5
"""Of `_Forward`, before the further tensors of a call."""


def _operator(kind: str, way: str) -> Any:
    return getattr(torch.ops.cs336_systems, f"{kind}_{way}")


class _Backward(torch.autograd.Function):
    """The gradients of q, k and v, and of the extras ``wanted``; they cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kind: str, spec: AttentionSpec, wanted: Sequence[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse, dout, dlse, *extras = tensors
        operands = *spec.operands, extras, wanted
        *gradients, of_extras = _operator(kind, "backward")(q, k, v, out, lse, dout, dlse, *operands)
        return *gradients, *of_extras

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
    def forward(
        kind: str, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _operator(kind, "forward")(q, k, v, *spec.operands, list(extras))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kind, ctx.spec, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *extras, out, lse = ctx.saved_tensors
        wanted = [position for position, needed in enumerate(ctx.needs_input_grad[_ARGUMENTS:]) if needed]
        dq, dk, dv, *of_wanted = _Backward.apply(ctx.kind, ctx.spec, wanted, q, k, v, out, lse, dout, dlse, *extras)
        of_extras = dict(zip(wanted, of_wanted, strict=True))
        return None, None, dq, dk, dv, *[of_extras.get(position) for position in range(len(extras))]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Any:
        raise RuntimeError(FORWARD_MODE)


def transformed(
    kind: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp by the operators of ``kind``, "flash" or "tiled"."""
    return _Forward.apply(kind, spec, q, k, v, *extras)
