"""The functions that a user calls: validate, choose, call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from . import choose, ops
from .choose import Explanation, Implementation
from .flash import FlashAttentionFunction
from .naive import compiled, naive
from .precision import autocast_inputs
from .sdpa import sdpa
from .spec import AttentionSpec
from .tiled import TiledAttentionFunction
from .validation import check

Result = tuple[Tensor, Tensor | None]
Run = Callable[[Tensor, Tensor, Tensor, AttentionSpec, bool], Result]

MOST_REMEMBERED = 4096
_remembered: dict[tuple[Any, ...], tuple[Run, AttentionSpec]] = {}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = ...,
    scale: float | None = ...,
    impl: str | Implementation = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = ...,
    scale: float | None = ...,
    impl: str | Implementation = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = ...,
    scale: float | None = ...,
    impl: str | Implementation = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    *,
    causal: bool | str = False,
    scale: float | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v, by the fastest implementation that can compute it.

    >>> q = k = v = torch.randn(2, 8, 128, 64)
    >>> attention(q, k, v, causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        q: queries (*batch, q_heads, q_len, d), in float16, bfloat16, float32 or float64. Three dimensions mean no head
            axis, (batch, q_len, d); two mean (q_len, d). Any strides.
        k: keys (*batch, kv_heads, k_len, d); kv_heads divides q_heads, and each serves a group of query heads.
        v: values (*batch, kv_heads, k_len, dv).
        causal: True or "bottom_right" hides what comes after a query, the last query aligned with the last key;
            "top_left" aligns the first ones, as torch's ``is_causal`` does.
        scale: what scores are multiplied by; 1 / sqrt(d) if None.
        impl: "flash" (Triton), "sdpa" (torch's own), "compiled", "tiled", "naive", or "auto" to choose. A named one
            never falls back to another.
        return_lse: also return the log-sum-exp of each query's scores, which is differentiable.

    Returns:
        out (*batch, q_heads, q_len, dv) in q's dtype, or (out, lse) with lse (*batch, q_heads, q_len), the natural
        log-sum-exp in float32 (float64 for float64 inputs). A query that sees no key gets 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation named cannot compute the call.

    float32 inputs are computed at float32-level error if ``torch.get_float32_matmul_precision()`` is "highest", the
    default, and in TF32 otherwise. Under autocast inputs are cast to its dtype.
    """
    q, k, v = autocast_inputs(q, k, v)
    run, spec = _prepare(q, k, v, causal, scale, impl, return_lse)
    if q.ndim == 2:
        out, lse = run(q[None], k[None], v[None], spec, return_lse)
        out, lse = out[0], None if lse is None else lse[0]
    else:
        out, lse = run(q, k, v, spec, return_lse)
    return out if lse is None else (out, lse)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
) -> Explanation:
    """Which implementation `attention` would use for these arguments, and why not each other one. Computes nothing."""
    q, k, v = autocast_inputs(q, k, v)
    return choose.explain(check(q, k, v, causal, scale, return_lse), impl)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    impl: str | Implementation,
    return_lse: bool,
) -> tuple[Run, AttentionSpec]:
    """What will run, and on which spec: validated and chosen once for each new combination of metadata."""
    if torch.compiler.is_compiling():
        return _choose(q, k, v, causal, scale, impl, return_lse)
    try:
        tensors = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
        # The types tell 1 from True, and what is no dense tensor from what is.
        key = (
            *tensors,
            causal,
            type(causal),
            scale,
            type(scale),
            impl,
            return_lse,
            type(return_lse),
            q.layout,
            k.layout,
            v.layout,
        )
        known = _remembered.get(key)
    except (AttributeError, TypeError, RuntimeError):
        # Not tensors, ragged ones, or not hashable: validation says what is wrong with them.
        return _choose(q, k, v, causal, scale, impl, return_lse)
    if known is None:
        known = _choose(q, k, v, causal, scale, impl, return_lse)
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = known
    return known


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    impl: str | Implementation,
    return_lse: bool,
) -> tuple[Run, AttentionSpec]:
    problem = check(q, k, v, causal, scale, return_lse)
    return RUN[choose.explain(problem, impl).choice], problem.spec


def _run_flash(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool) -> Result:
    needs_backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # Forward-mode tangents ride on tensors that require no gradient: the Function refuses them, the operator would not.
    if not needs_backward and forward_ad._current_level < 0:
        out, lse = ops.flash_forward(q, k, v, spec.causal.value, spec.scale)
        return out, lse if return_lse else None
    result = FlashAttentionFunction.apply(q, k, v, spec, None, return_lse)
    return result if return_lse else (result, None)


def _run_tiled(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool) -> Result:
    result = TiledAttentionFunction.apply(q, k, v, spec, None, return_lse)
    return result if return_lse else (result, None)


def _run_compiled(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool) -> Result:
    if torch.compiler.is_compiling():
        return naive(q, k, v, spec, return_lse)
    return compiled(q, k, v, spec, return_lse)


RUN: dict[Implementation, Run] = {
    Implementation.NAIVE: naive,
    Implementation.COMPILED: _run_compiled,
    Implementation.TILED: _run_tiled,
    Implementation.FLASH: _run_flash,
    Implementation.SDPA: sdpa,
}
