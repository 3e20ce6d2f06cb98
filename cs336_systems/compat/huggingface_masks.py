"""Masks of transformers for this library: none, where sequences begin, or bools.

`attention_mask` tells the layers of a forward pass which pairs are visible. Padded and packed batches are sequences of
the batch's rows put one after another, and their mask is a tensor of where these begin (`of_sequences`). It is no mask
for any other code: its dtype and shape make that raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MaskFunction = Callable[..., Any]


class Starts(NamedTuple):
    """Where sequences begin among the rows of a batch, all entries one after another.

    Attributes:
        q, k: (sequences + 1,) int32.
        is_real: (sequences,) int32, 0 for rows of padding; None if there are none.
        is_causal: False if all keys of a sequence are visible, None if the layer knows.
    """

    q: Tensor
    k: Tensor
    is_real: Tensor | None = None
    is_causal: bool | None = None


def of_sequences(q: Sequence[int], k: Sequence[int], real: Sequence[int], causal: bool, device: Any) -> Tensor:
    """A mask that says where sequences begin, and which are real: (sequences + 1, 3, 1, 1).

    It is int32 if the layer knows whether it is causal, and int64 if it is not.
    """
    starts = torch.tensor([q, k, [*real, 0]], dtype=torch.int32 if causal else torch.int64)
    return starts.to(device, non_blocking=True).T[..., None, None]


def is_cpu(device: Any) -> bool:
    """Whether each sequence is a call, because launching takes no time."""
    return torch.device(device).type == "cpu"


def starts_of(mask: Tensor | None) -> Starts | None:
    """What `of_sequences` made a mask of; None for other masks."""
    if mask is None or mask.shape[1:] != (3, 1, 1) or mask.dtype not in (torch.int32, torch.int64):
        return None
    q, k, is_real = mask[:, :, 0, 0].to(torch.int32).T.contiguous()
    return Starts(q, k, is_real[:-1], None if mask.dtype == torch.int32 else False)


_positions: tuple[Any, int, Starts | None] = (lambda: None), 0, None
"""The last position ids that were looked at, their version and what they say: all layers get the same."""


def starts_of_positions(position_ids: Tensor | None, batch_size: int) -> Starts | None:
    """Where sequences begin that are packed in a row: at position 0. None if every row is one sequence.

    This waits for the device once for all layers. transformers looks at them for most models before it makes a mask,
    and its flash attention in the layers.
    """
    global _positions
    if position_ids is None or position_ids.ndim != 2 or torch.compiler.is_compiling():
        return None
    of, version, starts = _positions
    if of() is not position_ids or version != position_ids._version:
        begins = position_ids[:, 1:] == 0
        others_follow = (begins | (position_ids.diff(dim=1) == 1)).all()
        starts = starts_of(_of_positions(position_ids)) if bool(begins.any() & others_follow) else None
        _positions = weakref.ref(position_ids), position_ids._version, starts
    if starts is not None and position_ids.shape[0] != batch_size:
        return starts_of(_of_positions(position_ids.expand(batch_size, -1)))
    return starts


def _of_positions(position_ids: Tensor) -> Tensor:
    return _of_ids((position_ids == 0).cumsum(1), position_ids.device)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass, for `attention_forward`; transformers calls it once for each type of layer.

    Args:
        q_length, kv_length: numbers of queries and keys.
        q_offset, kv_offset: positions of the first query and key; with a static cache q_offset is a tensor.
        mask_function: which pairs are visible, besides padding.
        attention_mask: (batch, length) bools, False for padding.
        allow_is_causal_skip: whether ``mask_function`` is a causal mask, with or without a sliding window.
        allow_is_bidirectional_skip: whether it shows all pairs, but for those further apart than ``local_size``.

    Returns:
        None, if what the layer passes is enough: causality and a window. `of_sequences` for padding at the ends, packed
        sequences, and unused slots of a cache after the keys. Bools (batch, 1, 1, kv_length) for padding elsewhere
        besides the layer's causality. Otherwise bools (batch, 1, q_length, kv_length), True for visible pairs.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    mask_function = mask_function or causal_mask_function
    padding = _padding(attention_mask, kv_length, kv_offset)
    if "device" not in kwargs and attention_mask is not None:
        kwargs["device"] = attention_mask.device
    device = kwargs.get("device", "cpu")
    is_full = allow_is_bidirectional_skip and local_size is None
    # A compiled graph cannot depend on the mask's values.
    if not torch.compiler.is_compiling():
        # On a GPU one query takes a mask of keys, and so does a bias, with which each sequence would be a call.
        few = q_length == 1 or hasattr(kwargs.get("config"), "relative_attention_num_buckets")
        if (allow_is_causal_skip or is_full) and (not few or is_cpu(device)):
            end = int(q_offset) + q_length - kv_offset if allow_is_causal_skip else kv_length
            spans = _spans(padding, batch_size, end, kv_length)
            if spans is not None:
                return _of_spans(spans, q_length, kv_length, end, allow_is_causal_skip, device)
        ids = _packed_ids(mask_function) if attention_mask is None else None
        if ids is not None and q_length == kv_length:
            return _of_ids(ids.expand(batch_size, -1), device)
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and ends_together:
        if padding is None or (not torch.compiler.is_compiling() and bool(padding.all())):
            return None
        if q_length > 1:
            return padding[:, None, None]
    if is_full and padding is not None:
        return padding[:, None, None].expand(-1, -1, q_length, -1)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        local_size=local_size,
        **kwargs,
    )


def flash_attention_mask(**arguments: Any) -> Tensor | None:
    """The mask for `huggingface.FLASH_NAME`: `attention_mask`, but None for packed sequences.

    transformers passes to each layer where sequences begin. Reading that here would wait for the device, which fails
    while continuous batching captures a CUDA graph.
    """
    mask_function = arguments.get("mask_function")
    if mask_function and arguments.get("attention_mask") is None and _packed_ids(mask_function) is not None:
        return None
    return attention_mask(**arguments)


def _padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(batch, kv_length) bools; slots beyond the mask's end are padding."""
    if attention_mask is None:
        return None
    padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    missing = kv_length - padding.shape[1]
    return torch.nn.functional.pad(padding, (0, missing)) if missing else padding


def _spans(padding: Tensor | None, batch_size: int, end: int, kv_length: int) -> list[tuple[int, int]] | None:
    """The first and the last + 1 of the keys that are no padding, for each entry; None if one has padding in between.

    Keys from ``end`` on are after all queries.
    """
    if not 0 <= end <= kv_length:
        return None
    if padding is None:
        return [(0, end)] * batch_size
    padding = padding[:, :end]
    first = padding.byte().argmax(1)
    numbers: list[list[int]] = torch.stack([first, padding.sum(1), padding.flip(1).byte().argmax(1)], 1).tolist()
    if any(count and count != end - start - after for start, count, after in numbers):
        return None
    return [(start, start + count) for start, count, _ in numbers]


def _of_spans(
    spans: list[tuple[int, int]], q_length: int, kv_length: int, end: int, causal: bool, device: Any
) -> Tensor | None:
    """The mask of entries that have keys in these spans alone. Each has three sequences: before, real, after.

    If it is causal, the last query has the place ``end`` - 1 among the keys, and queries of padding belong to it.
    """
    if all(span == (0, kv_length) for span in spans) and end == kv_length:
        return None
    q_starts, k_starts = [0], [0]
    for number, (first, last) in enumerate(spans):
        shift = end - q_length
        sides = [min(max(x - shift, 0), q_length) for x in (first, last)] if causal else [0, q_length]
        q_starts += [number * q_length + x for x in (*sides, q_length)]
        k_starts += [number * kv_length + x for x in (first, last, kv_length)]
    return of_sequences(q_starts, k_starts, [0, 1, 0] * len(spans), causal, device)


def _of_ids(ids: Tensor, device: Any) -> Tensor:
    """The mask of packed sequences: neighbours in a row (batch, length) with the same number are of the same."""
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = [*begins.flatten().nonzero()[:, 0].tolist(), ids.numel()]
    return of_sequences(starts, starts, [1] * (len(starts) - 1), True, device)


def _packed_ids(mask_function: MaskFunction) -> Tensor | None:
    """The numbers of the packed sequences, if transformers made this mask of them and a causal mask or a window."""
    name, captured = _captured(mask_function)
    both = captured.get("mask_functions", ())
    if name != "and_masks" or len(both) != 2:
        return None
    # Versions differ in which comes first, and older ones do not remap positions.
    for made, inner in zip(map(_captured, both), reversed(both), strict=True):
        if made[0] == "packed_sequence_mask_function":
            remapped = _captured(inner)
            if remapped[0] == "remap_positions_for_packed_sequence":
                inner = remapped[1]["mask_function"]
            return made[1]["packed_sequence_mask"] if _is_causal(inner) else None
    return None


def _is_causal(mask_function: MaskFunction) -> bool:
    """Whether it is transformers' causal mask, or that with a sliding window, which layers pass too."""
    from transformers.masking_utils import causal_mask_function

    name, captured = _captured(mask_function)
    both = captured.get("mask_functions", ())
    if name == "and_masks" and len(both) == 2 and _captured(both[0])[0] == "sliding_window_overlay":
        mask_function = both[1]
    return mask_function is causal_mask_function


def _captured(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """The name of the function of transformers that made a mask function, and what that one captured."""
    if getattr(function, "__module__", None) != "transformers.masking_utils" or not hasattr(function, "__code__"):
        return "", {}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__qualname__.split(".")[0], dict(zip(function.__code__.co_freevars, cells, strict=True))
