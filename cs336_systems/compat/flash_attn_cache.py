"""``flash_attn_with_kvcache``; see `cs336_systems.compat.flash_attn`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import attention, attention_with_cache
from ..attention.validation import INTEGERS
from ..kernels.torch_names import must_dispatch
from .arguments import Number, Pair, check_shape, to_bool, to_number, to_window
from .flash_attn_rotary import apply_rotary_emb, check_tables

Window = tuple[int | None, int | None]


def flash_attn_with_kvcache(
    q: Float[Tensor, "batch q_len q_heads d"],
    k_cache: Float[Tensor, "cache_batch capacity kv_heads d"],
    v_cache: Float[Tensor, "cache_batch capacity kv_heads dv"],
    k: Float[Tensor, "batch new kv_heads d"] | None = None,
    v: Float[Tensor, "batch new kv_heads dv"] | None = None,
    rotary_cos: Float[Tensor, "positions pairs"] | None = None,
    rotary_sin: Float[Tensor, "positions pairs"] | None = None,
    cache_seqlens: int | Int[Tensor, " batch"] | None = None,
    cache_batch_idx: Int[Tensor, " batch"] | None = None,
    cache_leftpad: Int[Tensor, " batch"] | None = None,
    block_table: None = None,
    softmax_scale: Number | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: Number = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Float[Tensor, "*batch q_heads"] | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into a KV cache, in place, and attend to all that it holds of each sequence.

    Args:
        q: queries (batch, q_len, q_heads, d).
        k_cache, v_cache: (cache_batch, capacity, kv_heads, d) and (..., dv); kv_heads divides q_heads. Slots that a
            sequence does not have may hold anything.
        k, v: new keys and values (batch, new, kv_heads, d) and (..., dv), written to the slots from ``cache_seqlens``.
        rotary_cos, rotary_sin: (positions, pairs), positions >= capacity, 2 * pairs <= d: k is rotated by the angles of
            its slots; q by those from ``cache_seqlens`` on if there is a causal mask or a window, else all of it by
            those of ``cache_seqlens``. Needs k.
        cache_seqlens: the slots that each sequence has before, (batch,) int32 or int64, or one number for all; None
            for all slots of the cache, if there is no k.
        cache_batch_idx: (batch,) int32 or int64, the cache entry of each sequence; entry i for sequence i if None. With
            equal ones, the new keys in the cache may be those of any of their sequences.
        cache_leftpad: (batch,) int32 or int64, the first slot of each sequence; 0 if None.
        block_table: must be None: paged caches are not supported.
        causal, window_size: as for `flash_attn.flash_attn_func`: the last query is aligned with the last key.
        softmax_scale, softcap, alibi_slopes: as for `flash_attn.flash_attn_func`.
        rotary_interleaved: whether elements (0, 1), (2, 3) and so on are rotated together; i and i + pairs if False.
        num_splits: how flash-attn splits a sequence; `attention_with_cache` chooses by itself.
        return_softmax_lse: also return the log-sum-exp.

    Lengths and indices in tensors on a GPU are not read by the host. Those that are out of range fail a device-side
    assertion if keys are written there or rotated; otherwise they count as the nearest.

    ``cache_batch_idx``, ``cache_leftpad`` and ``alibi_slopes`` copy the cache entries of the batch in every call; so
    does a window with several queries and without a causal mask.

    Returns:
        out (batch, q_len, q_heads, dv), contiguous, in q's dtype, or (out, softmax_lse) with softmax_lse (batch,
        q_heads, q_len). A query that sees no key gets 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, a device or a value is invalid, ``block_table`` is not None, or a gradient is required.
    """
    if block_table is not None:
        raise ValueError("block_table must be None: paged keys and values are not supported; got a block table")
    _check(q, k_cache, v_cache, k, v, alibi_slopes)
    _check_gradients(
        q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, alibi_slopes=alibi_slopes, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
    )  # fmt: skip
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 0:
        raise ValueError(f"num_splits must be an integer from 0 on; got {num_splits!r}")
    causal, window = to_bool("causal", causal), to_window(window_size)
    interleaved = to_bool("rotary_interleaved", rotary_interleaved)
    return_lse = to_bool("return_softmax_lse", return_softmax_lse)
    new = 0 if k is None else k.shape[1]
    lengths = _lengths(cache_seqlens, q, k_cache, has_new=k is not None, most=k_cache.shape[1] - new)
    entries = None
    if cache_batch_idx is not None:
        entries = _integers("cache_batch_idx", cache_batch_idx, q, k_cache.shape[0] - 1)
    elif k_cache.shape[0] < q.shape[0]:
        raise ValueError(f"k_cache must have at least {q.shape[0]} entries to match q; got {k_cache.shape[0]}")
    first = None if cache_leftpad is None else _integers("cache_leftpad", cache_leftpad, q, k_cache.shape[1])
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise ValueError("rotary_cos and rotary_sin must be None where no k is given; got tensors")
        cos, sin = _check_rotary(k_cache, k, rotary_cos, rotary_sin)
        rows = q if causal or window != (None, None) else q.flatten(1, 2)[:, None]
        q = apply_rotary_emb(rows, cos, sin, interleaved, seqlen_offsets=lengths).view_as(q)
        k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    if k is not None and v is not None:
        _write(k_cache, v_cache, k, v, entries, lengths)
        lengths = lengths + new
    keys, values = (x[: q.shape[0]] if entries is None else x.index_select(0, entries) for x in (k_cache, v_cache))
    options = {"scale": to_number(softmax_scale), "softcap": to_number(softcap) or None}
    if first is None and alibi_slopes is None and (causal or q.shape[1] <= 1 or window == (None, None)):
        out, lse = _attend(q, keys, values, lengths, causal, window, options)
    else:
        out, lse = _attend_masked(q, keys, values, lengths, first, causal, window, alibi_slopes, options)
    out = out.transpose(1, 2).contiguous()
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, causal: bool, window: Window, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Without copies of the caches: a causal mask, one query, or neither a mask nor a window."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    rows = q
    if not causal and q.shape[2] > 1:
        rows = q.flatten(1, 2)[:, :, None]  # a query that sees all keys is the last token of a head
    out, lse = attention_with_cache(rows, k, v, lengths, window=(window[0], None), return_lse=True, **options)
    return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def _attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    first: Tensor | None,
    causal: bool,
    window: Window,
    slopes: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Any call, by a mask of pairs."""
    capacity = k.shape[1]
    first = torch.zeros_like(lengths) if first is None else first
    slots = torch.arange(capacity, device=k.device)
    used = ((slots >= first[:, None]) & (slots < lengths[:, None]))[:, :, None, None]
    # A probability of 0 times the NaN of an unused slot would be NaN.
    k, v = (torch.where(used, x, 0) for x in (k, v))
    shifts = lengths - q.shape[1]
    left, right = (capacity + q.shape[1] if side is None else side for side in window)
    right = 0 if causal else right

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        ahead = kv_idx - q_idx - shifts[b]
        return (kv_idx >= first[b]) & (kv_idx < lengths[b]) & (ahead <= right) & (ahead >= -left)

    def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - by_head[b, h] * (kv_idx - q_idx - shifts[b]).abs()

    scores = None
    if slopes is not None:
        by_head, scores = slopes.expand(q.shape[0], -1), alibi
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return attention(q, k, v, mask=mask, scores=scores, return_lse=True, **options)


def _write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, entries: Tensor | None, lengths: Tensor) -> None:
    """Write new keys and values to the slots from ``lengths`` on."""
    batch, new, capacity = *k.shape[:2], k_cache.shape[1]
    entries = torch.arange(batch, device=k.device) if entries is None else entries
    slots = lengths[:, None] + torch.arange(new, device=k.device)
    # Indexing would take a negative number for one from the end.
    entries, slots = (i.masked_fill(i < 0, n) for i, n in ((entries[:, None], k_cache.shape[0]), (slots, capacity)))
    k_cache[entries, slots] = k
    v_cache[entries, slots] = v


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, slopes: Tensor | None
) -> None:
    """Raise unless the tensors with heads fit."""
    check_shape("q", q, "batch", "q_len", "q_heads", "d")
    check_shape("k_cache", k_cache, "cache_batch", "capacity", "kv_heads", q.shape[3])
    entries, capacity, heads, d = k_cache.shape
    check_shape("v_cache", v_cache, entries, capacity, heads, "dv")
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together; got {'v' if k is None else 'k'} alone")
    new = None if k is None or v is None else (k, v)
    if new is not None:
        check_shape("k", new[0], q.shape[0], "new", heads, d)
        check_shape("v", new[1], q.shape[0], new[0].shape[1], heads, v_cache.shape[3])
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    for name, x in given.items():
        if x is not None and (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"{name} must be {q.dtype} on {q.device} to match q; got {x.dtype} on {x.device}")
    if slopes is not None and tuple(slopes.shape) not in ((q.shape[2],), (q.shape[0], q.shape[2])):
        raise ValueError(
            f"alibi_slopes must have shape ({q.shape[2]},) or ({q.shape[0]}, {q.shape[2]}); got {tuple(slopes.shape)}"
        )


def _check_gradients(**tensors: Tensor | None) -> None:
    needs = [name for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad]
    if needs and torch.is_grad_enabled():
        raise ValueError(
            f"{needs[0]} must need no gradient: attention over a cache has no backward pass; "
            "call it under torch.no_grad()"
        )


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor, k_cache: Tensor, *, has_new: bool, most: int) -> Tensor:
    """The slots that each sequence has before, on the device."""
    if isinstance(cache_seqlens, Tensor):
        return _integers("cache_seqlens", cache_seqlens, q, most)
    if cache_seqlens is None and has_new:
        raise ValueError("cache_seqlens must be given where k is; got None")
    length = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"cache_seqlens must be an int or a tensor; got {type(length).__name__}")
    _check_range("cache_seqlens", length, length, most)
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _integers(name: str, x: Tensor, q: Tensor, most: int) -> Tensor:
    """x, if it has an integer for each sequence; on a CPU, from 0 to ``most``."""
    expected = f"{name} must be ({q.shape[0]},) int32 or int64 numbers on {q.device} to match q"
    if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
        raise TypeError(f"{expected}; got {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    if tuple(x.shape) != (q.shape[0],) or x.device != q.device:
        raise ValueError(f"{expected}; got {tuple(x.shape)} on {x.device}")
    if x.device.type == "cpu" and not must_dispatch(x) and x.numel():
        _check_range(name, int(x.min()), int(x.max()), most)
    return x


def _check_range(name: str, least: int, largest: int, most: int) -> None:
    if least < 0 or largest > most:
        got = least if least == largest else f"{least} to {largest}"
        raise ValueError(f"{name} must be from 0 to {most}; got {got}")


def _check_rotary(k_cache: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        alone = "rotary_sin" if cos is None else "rotary_cos"
        raise ValueError(f"rotary_cos and rotary_sin must be given together; got {alone} alone")
    check_tables(k, cos, sin, expected=4)
    if cos.shape[0] < k_cache.shape[1]:
        raise ValueError(f"rotary_cos must have at least {k_cache.shape[1]} rows, the capacity; got {cos.shape[0]}")
    return cos, sin
