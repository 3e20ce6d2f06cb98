"""Attention of a few new queries over a preallocated cache, whose lengths the device alone knows."""

from __future__ import annotations

from typing import Literal, overload

from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Never

from .api import run
from .call import Arguments, make_call
from .explanation import Explanation, explain_call
from .hints import refuse_unknown
from .precision import autocast_inputs
from .validation import Implementation, Window, check_cache, check_lengths

OPTIONS = ("window", "scale", "softcap", "impl", "return_lse")


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
    **unknown: Never,
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
        impl: "flash" (Triton), "naive" (plain PyTorch, every score in memory), "sdpa" (torch's function, one sequence
            after another: on a CPU, without a soft cap, with a window for one new token), or "auto" to choose. A named
            one never falls back to another.
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
    if unknown:
        refuse_unknown(unknown, OPTIONS)
    arguments = Arguments(True, window, scale, softcap, return_lse=return_lse)
    out, lse = run(q, k, v, arguments, impl, cache_lengths=check_lengths(lengths))
    return out if lse is None else (out, lse)


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
    **unknown: Never,
) -> Explanation:
    """Which backend `attention_with_cache` would use, and why not each other one. Computes nothing."""
    if unknown:
        refuse_unknown(unknown, OPTIONS)
    q, k, v = autocast_inputs(q, k, v)  # before the check that they have the same dtype
    arguments = Arguments(True, window, scale, softcap, return_lse=return_lse)
    check_cache(q, k, v, check_lengths(lengths))
    return explain_call(make_call(q, k, v, arguments, cache_lengths=lengths), impl)
