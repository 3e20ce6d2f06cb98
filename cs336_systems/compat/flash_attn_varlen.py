"""The functions of ``flash_attn`` for packed sequences; see `flash_attn`."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from ..attention import attention_varlen
from .arguments import Number, Pair, number_in, parts, settings_of

Returned = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_varlen_func(
    q: Float[Tensor, "all_q q_heads d"],
    k: Float[Tensor, "all_k kv_heads d"],
    v: Float[Tensor, "all_k kv_heads dv"],
    cu_seqlens_q: Int[Tensor, " sequences+1"],
    cu_seqlens_k: Int[Tensor, " sequences+1"],
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*sequences q_heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Returned:
    """`flash_attn.flash_attn_func` of each of several packed sequences.

    Args:
        q: queries (all_q, q_heads, d), those of all sequences one after another.
        k: keys (all_k, kv_heads, d); kv_heads divides q_heads.
        v: values (all_k, kv_heads, dv); dv may differ from d.
        cu_seqlens_q: (sequences + 1,) int32 or int64: sequence i has the queries from cu_seqlens_q[i] up to the next.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: the length of the longest sequence of queries, which this library does not need.
        max_seqlen_k: the same of keys.
        alibi_slopes: (q_heads,) or (sequences, q_heads).
        block_table: keys and values in pages are not supported: None.

    The other arguments are as there.

    Returns:
        out (all_q, q_heads, dv) in q's dtype; or (out, softmax_lse, S_dmask) with softmax_lse (q_heads, all_q) and
        S_dmask always None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or there is a ``block_table``.
    """
    if block_table is not None:
        raise ValueError("block_table must be None: keys and values in pages are not supported; got one")
    settings = settings_of(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    starts = (cu_seqlens_q, cu_seqlens_k)
    most_q, most_k = number_in(max_seqlen_q), number_in(max_seqlen_k)
    result = attention_varlen(q, k, v, *starts, max_seqlen_q=most_q, max_seqlen_k=most_k, **settings)
    if isinstance(result, Tensor):
        return result.contiguous()
    out, lse = result
    return out.contiguous(), lse, None


def flash_attn_varlen_qkvpacked_func(
    qkv: Float[Tensor, "all 3 heads d"],
    cu_seqlens: Int[Tensor, " sequences+1"],
    max_seqlen: int | Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*sequences heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor (all, 3, heads, d)."""
    q, k, v = parts("qkv", qkv, 3, "all")
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *settings)


def flash_attn_varlen_kvpacked_func(
    q: Float[Tensor, "all_q q_heads d"],
    kv: Float[Tensor, "all_k 2 kv_heads d"],
    cu_seqlens_q: Int[Tensor, " sequences+1"],
    cu_seqlens_k: Int[Tensor, " sequences+1"],
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: Number = 0.0,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    alibi_slopes: Float[Tensor, "*sequences q_heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Returned:
    """`flash_attn_varlen_func` of keys and values in one tensor (all_k, 2, kv_heads, d)."""
    k, v = parts("kv", kv, 2, "all_k")
    settings = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *settings)
