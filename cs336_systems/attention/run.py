"""How each implementation is called, and the options that the public functions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from ..kernels.settings import Window
from ..kernels.torch_names import exporting, in_forward_mode
from . import ops
from .choose import Implementation
from .exported import exported
from .flash import FlashAttentionFunction
from .naive import compiled, naive
from .rules import Mask, Scores
from .sdpa import sdpa
from .spec import AttentionSpec
from .tiled import TiledAttentionFunction
from .transforms import transformed

Result = tuple[Tensor, Tensor | None]
Run = Callable[[Tensor, Tensor, Tensor, AttentionSpec, bool, tuple[Tensor, ...]], Result]


class TensorFeatures(TypedDict, total=False):
    """The keyword arguments of `attention` that are tensors or hold some."""

    alibi_slopes: Tensor | None
    bias: Tensor | None
    scores: Scores | None
    mask: Tensor | Mask | None
    sinks: Tensor | None
    seed: int | Tensor | None
    generator: torch.Generator | None


class Options(TensorFeatures, total=False):
    """The keyword arguments of `attention`, but for ``return_lse``."""

    causal: bool | str
    window: Window | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    deterministic: bool | None
    impl: str | Implementation


def _run_flash(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool, extras: tuple[Tensor, ...]
) -> Result:
    if exporting():
        out, lse = exported("flash", q, k, v, spec, extras)
        return out, lse if return_lse else None
    if ops.transforming():
        out, lse = transformed("flash", q, k, v, spec, extras)
        return out, lse if return_lse else None
    needs_gradient = q.requires_grad or k.requires_grad or v.requires_grad or any(x.requires_grad for x in extras)
    needs_backward = needs_gradient and torch.is_grad_enabled()
    # Forward-mode tangents ride on tensors that require no gradient: the Function refuses them, the operator would not.
    if not needs_backward and not in_forward_mode():
        out, lse = ops.flash_forward(q, k, v, *spec.operands, extras)
        return out, lse if return_lse else None
    result = FlashAttentionFunction.apply(q, k, v, spec, None, return_lse, *extras)
    return result if return_lse else (result, None)


def _run_tiled(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool, extras: tuple[Tensor, ...]
) -> Result:
    if torch.compiler.is_compiling():
        # Its loops would be written out, for one length, and be slow to compile.
        out, lse = exported("tiled", q, k, v, spec, extras)
        return out, lse if return_lse else None
    if ops.transforming():
        out, lse = transformed("tiled", q, k, v, spec, extras)
        return out, lse if return_lse else None
    result = TiledAttentionFunction.apply(q, k, v, spec, None, return_lse, *extras)
    return result if return_lse else (result, None)


def _run_compiled(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool, extras: tuple[Tensor, ...]
) -> Result:
    if torch.compiler.is_compiling():
        return naive(q, k, v, spec, return_lse, extras)
    if ops.transforming():
        problem = "torch.func does not transform what torch.compile made; compile the transform, of impl='naive'"
        raise ValueError(f"impl='compiled' cannot compute this call: {problem}")
    return compiled(q, k, v, spec, return_lse, extras)


RUN: dict[Implementation, Run] = {
    Implementation.NAIVE: naive,
    Implementation.COMPILED: _run_compiled,
    Implementation.TILED: _run_tiled,
    Implementation.FLASH: _run_flash,
    Implementation.SDPA: sdpa,
}
