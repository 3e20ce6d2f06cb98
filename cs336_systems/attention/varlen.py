"""Attention of sequences of different lengths, packed one after another, without padding."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import Unpack

from ..kernels.torch_names import must_dispatch
from .api import AttentionOptions, run
from .call import Arguments, make_call
from .explanation import Explanation, explain_call
from .precision import autocast_inputs
from .rules import Mask
from .sizes import Packed
from .validation import Implementation, check_starts, check_starts_match, check_tensors, lengths_of, shape_of


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = ...,
    *,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    return_lse: bool,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Float[Tensor, "all_q q_heads d"],
    k: Float[Tensor, "all_k kv_heads d"],
    v: Float[Tensor, "all_k kv_heads dv"],
    cu_seqlens_q: Int[Tensor, " sequences+1"],
    cu_seqlens_k: Int[Tensor, " sequences+1"] | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of packed sequences: each query sees keys of its own sequence alone, as if it were called for each.

    >>> q = k = v = torch.randn(7, 8, 64)  # of 3, 0 and 4 tokens
    >>> attention_varlen(q, k, v, torch.tensor([0, 3, 3, 7]), causal=True).shape
    torch.Size([7, 8, 64])

    Nothing is padded, and no length is asked of the device: the kernels look them up, so other lengths compile nothing
    and wait for nothing.

    Args:
        q: queries (all_q, q_heads, d), those of all sequences, in float16, bfloat16, float32 or float64. Any strides.
        k: keys (all_k, kv_heads, d); kv_heads divides q_heads.
        v: values (all_k, kv_heads, dv).
        cu_seqlens_q: (sequences + 1,) int32 or int64 on q's device: sequence i has the queries cu_seqlens_q[i] to
            cu_seqlens_q[i + 1]. The first is 0; rows after the last see nothing. Looked at on the CPU; on a GPU numbers
            out of order give meaningless results, but nothing is read or written out of bounds.
        cu_seqlens_k: as cu_seqlens_q, of the keys; cu_seqlens_q if None.
        max_seqlen_q: how many queries no sequence exceeds. What has an element for each row (a mask or bias, or what
            rules captured) needs it, and lists of blocks; nothing else.
        max_seqlen_k: the largest number of keys of a sequence, for what has an element for each column.
        options: as `attention` takes them. Sequences stand for entries of the batch, and rows and columns count from
            where a sequence begins: a bias broadcasts to (sequences, q_heads, max_seqlen_q, max_seqlen_k).

    Returns:
        out (all_q, q_heads, dv) in q's dtype, or (out, lse) with lse (q_heads, all_q), as `attention` describes them.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or the implementation named cannot compute the call.
    """
    arguments: dict[str, Any] = {**options}
    impl = arguments.pop("impl", "auto")
    packed = packed_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, arguments.get("mask"))
    out, lse = run(*as_heads(q, k, v), Arguments.of(q, **arguments, return_lse=return_lse), impl, packed)
    out = out[0].transpose(0, 1)
    return out if lse is None else (out, lse[0])


def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Explanation:
    """Which backend `attention_varlen` would use, and why not each other one. Computes nothing."""
    q, k, v = autocast_inputs(q, k, v)
    arguments: dict[str, Any] = {**options}
    impl = arguments.pop("impl", "auto")
    packed = packed_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, arguments.get("mask"))
    call = make_call(*as_heads(q, k, v), Arguments.of(q, **arguments, return_lse=return_lse), packed)
    return explain_call(call, impl)


def nested_attention(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, impl: str | Implementation
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of nested tensors with the layout torch.jagged, (batch, heads, length, d), and of nothing else."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout is not torch.jagged:
            kind = type(tensor).__name__ if not isinstance(tensor, Tensor) else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a nested tensor of layout torch.jagged, as q, k and v all are; got {kind}")
        if tensor.ndim != 4 or tensor.transpose(1, 2).lengths() is not None:  # type: ignore[attr-defined]
            what = f"{tensor.ndim} dimensions" if tensor.ndim != 4 else "holes between its sequences"
            raise ValueError(f"{name} must be nested as (batch, heads, length, d), without holes; got {what}")
    by_length = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    starts = [tensor.offsets() for tensor in by_length]  # type: ignore[attr-defined]
    if by_length[1].shape[1] != by_length[2].shape[1]:
        raise ValueError("v must have the lengths of k, from the same offsets; got others")
    values = [tensor.values() for tensor in by_length]
    result: Any = attention_varlen(*values, *starts[:2], **arguments._asdict(), impl=impl)
    if isinstance(result, Tensor):
        return _nested(result, starts[0])
    out, lse = result
    return _nested(out, starts[0]), _nested(lse.mT, starts[0])


def _nested(packed: Tensor, starts: Tensor) -> Tensor:
    nested: Tensor = torch.nested.nested_tensor_from_jagged(packed, starts)
    return nested.transpose(1, 2)


def as_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, heads, all rows, d)."""
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def packed_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    k_starts: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    mask: Any,
) -> Packed:
    """The packed sequences, validated."""
    check_tensors(q=q, k=k, v=v)
    _check_shapes(q, k, v)
    k_starts = q_starts if k_starts is None else k_starts
    for name, starts, of, most in (("q", q_starts, q, max_seqlen_q), ("k", k_starts, k, max_seqlen_k)):
        _check_most(f"max_seqlen_{name}", most)
        check_starts(name, starts, of.device, name)
        if starts.device.type == "cpu" and not must_dispatch(starts):  # elsewhere asking would stop the device
            lengths_of(name, starts, most, of.shape[0])
    check_starts_match(q_starts, k_starts)
    _check_listed(mask, q_starts, k_starts)
    return Packed(q_starts.contiguous(), k_starts.contiguous(), max_seqlen_q, max_seqlen_k)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 3:
            raise ValueError(f"{name} must have shape (all rows, heads, d); got {shape_of(tensor)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have a head dimension of {q.shape[-1]} to match q; got {shape_of(k)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have shape ({k.shape[0]}, {k.shape[1]}, *) to match k; got {shape_of(v)}")


def _check_listed(mask: Any, q_starts: Tensor, k_starts: Tensor) -> None:
    """On a CPU: lists of blocks are for these sequences. Elsewhere asking would stop the device."""
    blocks = mask.blocks if isinstance(mask, Mask) else None
    if blocks is None or blocks.starts is None or q_starts.device.type != "cpu" or must_dispatch(q_starts):
        return
    for name, starts, listed in zip("qk", (q_starts, k_starts), blocks.starts, strict=True):
        if starts.tolist() != listed.tolist():
            raise ValueError(
                f"mask must have blocks that were found for these sequences; got others in cu_seqlens_{name}"
            )


def _check_most(name: str, most: int | None) -> None:
    if most is None:
        return
    if isinstance(most, bool) or not isinstance(most, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or None; got {most!r} of type {type(most).__name__}")
    if most < 0:
        raise ValueError(f"{name} must be at least 0; got {most}")
