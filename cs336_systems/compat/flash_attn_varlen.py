"""The functions of ``flash_attn`` for packed sequences; see `cs336_systems.compat.flash_attn`."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from ..attention import attention_varlen
from .arguments import Number, Pair, check_shape, to_number, to_options

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
    """`flash_attn.flash_attn_func` for each of several packed sequences.

    Args:
        q: queries (all_q, q_heads, d), concatenated.
        k: keys (all_k, kv_heads, d); kv_heads divides q_heads.
        v: values (all_k, kv_heads, dv); dv may differ from d.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) cumulative lengths, int32 or int64: sequence i has the rows from
            cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        max_seqlen_q, max_seqlen_k: maximum lengths.
        alibi_slopes: (q_heads,) or (sequences, q_heads).
        block_table: must be None: paged keys and values are not supported.

    The other arguments are those of `flash_attn.flash_attn_func`.

    Returns:
        out (all_q, q_heads, dv) in q's dtype; or (out, softmax_lse, S_dmask) with softmax_lse (q_heads, all_q) and
        S_dmask None.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a value is invalid, or ``block_table`` is not None.
    """
    if block_table is not None:
        raise ValueError("block_table must be None: paged keys and values are not supported; got a block table")
    options = to_options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    longest = {"max_seqlen_q": to_number(max_seqlen_q), "max_seqlen_k": to_number(max_seqlen_k)}
    result = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **longest, **options)
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
    """`flash_attn_varlen_func` for queries, keys and values in one tensor (all, 3, heads, d)."""
    check_shape("qkv", qkv, "all", 3, "heads", "d")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


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
    """`flash_attn_varlen_func` for keys and values in one tensor (all_k, 2, kv_heads, d)."""
    check_shape("kv", kv, "all_k", 2, "heads", "d")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)
