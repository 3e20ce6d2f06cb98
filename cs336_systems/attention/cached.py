"""Attention of a few new queries over a preallocated cache, whose lengths the device alone knows."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..kernels.settings import Window
from . import choose, ops
from .api import attention
from .choose import Explanation, Implementation
from .features import positive
from .precision import autocast_inputs
from .validation import Problem, check, shape_of
from .varlen import INTEGERS

PREFERENCE = {"cuda": (Implementation.FLASH, Implementation.NAIVE), "cpu": (Implementation.NAIVE,)}
"""The order in which "auto" asks, by device type; other devices are asked as the CPU is."""

MOST_REMEMBERED = 4096

_Chosen = tuple[Implementation, float, int | None]
_remembered: dict[tuple[Any, ...], _Chosen] = {}


@overload
def attention_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    impl: str | Implementation = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    window: Window | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    impl: str | Implementation = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention_with_cache(
    q: Float[Tensor, "batch q_heads new d"],
    k: Float[Tensor, "batch kv_heads capacity d"],
    v: Float[Tensor, "batch kv_heads capacity dv"],
    lengths: Int[Tensor, " batch"],
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v of the last tokens of each sequence, over all that a cache holds of it.

    >>> k = v = torch.randn(2, 4, 1024, 64)  # room for 1,024 tokens
    >>> q = torch.randn(2, 16, 1, 64)
    >>> attention_with_cache(q, k, v, torch.tensor([700, 20])).shape
    torch.Size([2, 16, 1, 64])

    Keys and values of the new tokens are in the cache already. No length is asked of the device, nor does anything that
    is launched depend on one, so a call can be recorded in a CUDA graph and replayed with other lengths.

    Args:
        q: queries (batch, q_heads, new, d) of the last ``new`` tokens of every sequence, in float16, bfloat16, float32
            or float64. Any strides. They are meant to be few: all queries of a group read the cache together, 32 at a
            time.
        k: keys (batch, kv_heads, capacity, d); kv_heads divides q_heads.
        v: values (batch, kv_heads, capacity, dv).
        lengths: (batch,) int32 or int64 on q's device: how many slots each sequence has, those of its new tokens
            included. Query i has slot lengths - new + i; it sees that and those before, and nothing if it is negative.
            What is in slots from the length on is never looked at. On a CPU numbers below 0 or beyond the capacity are
            refused; on a GPU they count as 0 and as the capacity.
        window: (before, after), how many slots before its own a query sees, None for all; ``after`` changes nothing.
        scale: what scores are multiplied by; 1 / sqrt(d) if None.
        softcap: bounds scores by softcap * tanh(score / softcap).
        impl: "flash" (Triton), "naive" (plain PyTorch, every score in memory), or "auto" to choose. A named one never
            falls back to another.
        return_lse: also return the log-sum-exp of each query's scores.

    Returns:
        out (batch, q_heads, new, dv) in q's dtype, or (out, lse) with lse (batch, q_heads, new), the natural
        log-sum-exp in float32 (float64 for float64 inputs). A query that sees no slot gets 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, the implementation named cannot compute the call, or gradients
            would be needed: there is no backward pass.

    float32 inputs are computed in float32 if ``torch.get_float32_matmul_precision()`` is "highest", the default, and in
    TF32 otherwise. Under autocast inputs are cast to its dtype: keep the cache in that.
    """
    q, k, v = autocast_inputs(q, k, v)
    chosen, scale, before = _prepare(q, k, v, lengths, window, scale, softcap, impl, return_lse)
    _check_lengths(lengths, k.shape[-2])
    compute = _flash if chosen is Implementation.FLASH else _naive
    out, lse = compute(q, k, v, lengths, scale, before, softcap)
    return (out, lse) if return_lse else out


def explain_with_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    impl: str | Implementation = "auto",
    return_lse: bool = False,
) -> Explanation:
    """Which implementation `attention_with_cache` would use, and why not each other one. Computes nothing."""
    q, k, v = autocast_inputs(q, k, v)
    problem = _check(q, k, v, lengths, window, scale, softcap, return_lse)
    return choose.explain(problem, impl, PREFERENCE, _why_not)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    impl: str | Implementation,
    return_lse: bool,
) -> _Chosen:
    """What computes a call, its scale, and how far back it sees: found once for each new combination of metadata."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (q, k, v)):
        raise ValueError(
            "q, k and v must need no gradients: attention over a cache has no backward pass; "
            "call it under torch.no_grad(), or attention()"
        )
    key: tuple[Any, ...] | None = None
    if not torch.compiler.is_compiling():
        try:
            tensors = tuple([(x.shape, x.dtype, x.device, x.layout) for x in (q, k, v, lengths)])
            # The types tell 1 from True.
            settings = (window, window and tuple(map(type, window)), scale, softcap, impl, return_lse)
            key = (*tensors, *settings, type(scale), type(softcap), type(return_lse))
            known = _remembered.get(key)
        except (AttributeError, TypeError, RuntimeError):
            known = None  # not tensors, or not hashable: validation says what is wrong with them
        if known is not None:
            return known
    problem = _check(q, k, v, lengths, window, scale, softcap, return_lse)
    spec = problem.spec
    chosen = choose.choose(problem, impl, PREFERENCE, _why_not), spec.scale, spec.window[0]
    if key is not None:
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = chosen
    return chosen


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
) -> Problem:
    problem = check(q, k, v, True, scale, return_lse, window)
    if q.ndim != 4:
        raise ValueError(f"q must have shape (batch, q_heads, new, d); got {shape_of(q)}")
    positive("softcap", softcap)
    expected = "lengths must be (batch,) int32 or int64 numbers"
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{expected}; got {type(lengths).__name__}")
    if lengths.dtype not in INTEGERS:
        raise TypeError(f"{expected}; got {lengths.dtype}")
    if tuple(lengths.shape) != (q.shape[0],):
        raise ValueError(f"lengths must have shape ({q.shape[0]},) to match q; got {shape_of(lengths)}")
    if lengths.device != q.device:
        raise ValueError(f"lengths must be on {q.device} to match q; got {lengths.device}")
    return problem


def _check_lengths(lengths: Tensor, capacity: int) -> None:
    if lengths.device.type != "cpu" or ops.must_dispatch(lengths):
        return  # only the device knows, and asking it would stop it
    numbers: list[int] = lengths.tolist()
    if numbers and (min(numbers) < 0 or max(numbers) > capacity):
        got = numbers if len(numbers) < 20 else f"{min(numbers)} to {max(numbers)}"
        raise ValueError(f"lengths must be from 0 to {capacity}, the slots of k; got {got}")


def _why_not(implementation: Implementation, problem: Problem) -> str | None:
    if implementation in (Implementation.FLASH, Implementation.NAIVE):
        return choose.why_not(implementation, problem)
    return "it takes no lengths that the device alone knows"


def _naive(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, before: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    new, capacity = q.shape[2], k.shape[2]
    filled = lengths.to(torch.int64).clamp(0, capacity)[:, None, None, None]
    slots = torch.arange(capacity, device=q.device)
    distance = filled - new + torch.arange(new, device=q.device)[:, None] - slots
    seen = distance >= 0
    if before is not None:
        seen = seen & (distance <= before)
    # A weight of 0 makes 0 of anything that is finite, and memory that nobody wrote may hold what is not.
    v = v.masked_fill((slots >= filled.squeeze(-1))[..., None], 0.0)
    return attention(q, k, v, mask=seen, scale=scale, softcap=softcap, impl=Implementation.NAIVE, return_lse=True)


FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor lengths, float scale, SymInt? before, float? softcap) -> (Tensor, Tensor)"
)

ops.library.define(f"flash_with_cache{FORWARD}", tags=(torch.Tag.pt2_compliant_tag,))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, before: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    ops.check_rows(q, k)
    from . import scaffold

    return scaffold.decode(q, k, v, lengths, scale, before, softcap)


for _device in ("CUDA", "CPU"):
    ops.library.impl("flash_with_cache", _forward, _device)


@torch.library.register_fake(f"{ops.NAMESPACE}::flash_with_cache", lib=ops.library)  # type: ignore[untyped-decorator]
def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, before: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, before: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    if ops.must_dispatch(q, k, v, lengths):
        return torch.ops.cs336_systems.flash_with_cache(q, k, v, lengths, scale, before, softcap)
    return _forward(q, k, v, lengths, scale, before, softcap)
