"""The functions of ``flash_attn.bert_padding``: from padded sequences to packed ones, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor


def unpad_input(
    hidden_states: Shaped[Tensor, "batch length ..."],
    attention_mask: Shaped[Tensor, "batch length"],
    unused_mask: Shaped[Tensor, "batch length"] | None = None,
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that a mask keeps, packed.

    Args:
        hidden_states: (batch, length, ...).
        attention_mask: (batch, length) bools or integers, not 0 for valid rows.
        unused_mask: (batch, length), likewise, rows that are packed too but are not valid.

    Returns:
        the rows (total, ...), their indices (total,) in (batch * length), cu_seqlens (batch + 1,) in int32, the maximum
        length as an int, which waits for the device, and the number of valid rows of each sequence (batch,) in int32.
        The rows are differentiable.

    Raises:
        TypeError, ValueError: a mask has another dtype or shape.
    """
    valid = packed = _mask("attention_mask", attention_mask, hidden_states) != 0
    if unused_mask is not None:
        packed = valid | (_mask("unused_mask", unused_mask, hidden_states) != 0)
    return *_pack(hidden_states, packed, packed.sum(-1)), valid.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Shaped[Tensor, "batch length ..."], attention_mask_in_length: Int[Tensor, "batch length"]
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` for rows of the batch that hold several sequences one after another, and padding after these.

    ``attention_mask_in_length`` (batch, length) has the lengths of a row's sequences, and 0 in its other places:
    [[2, 3, 0, 0, 0, 0]] is two sequences and a row of padding.

    Returns:
        the rows (total, ...), their indices (total,), cu_seqlens (sequences + 1,) in int32, and the maximum length.
    """
    lengths = _mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    packed = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(-1, keepdim=True)
    return _pack(hidden_states, packed, lengths[lengths != 0])


def pad_input(
    hidden_states: Shaped[Tensor, "total ..."], indices: Int[Tensor, " total"], batch: int, seqlen: int
) -> Shaped[Tensor, "batch length ..."]:
    """Packed rows (total, ...) at their ``indices`` in (batch, seqlen, ...), and 0 elsewhere; undoes `unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(input: Shaped[Tensor, "rows ..."], indices: Int[Tensor, " total"]) -> Shaped[Tensor, "total ..."]:
    """The rows of ``input`` with these indices, differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(
    values: Float[Tensor, "total ..."], indices: Int[Tensor, " total"], first_axis_dim: int
) -> Float[Tensor, "rows ..."]:
    """A tensor of ``first_axis_dim`` rows: ``values`` at these indices, which differ, and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def _mask(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a tensor of bools or integers; got {got}")
    if mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{name} must have shape {tuple(hidden_states.shape[:2])} to match hidden_states; got {tuple(mask.shape)}"
        )
    return mask


def _pack(hidden_states: Tensor, packed: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    indices = packed.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = max(lengths.tolist(), default=0)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
