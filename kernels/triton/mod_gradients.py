"""The gradients of tensors that score rules captured: the buffers that kernels write, and their reduction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..bound_mods import Term
from ..call import Aux
from ..lib.reductions import locate_rows
from ..mods import AXES

AXES_LEFT = {name: ("batch", "head", name) for name in ("row", "column", "distance")}
"""The axes of a buffer."""


def empty_buffer(term: Term, shape: tuple[int, int, int, int], lengths: tuple[int, int], size: int, aux: Aux) -> Tensor:
    """The uninitialised buffer of a term.

    "pair": the gradient itself, with all of `AXES`. "distance": (batch, heads, bands, 2, size) in float32, two sums for
    each diagonal of square tiles, see `pair_gradients`. "row" and "column": (batch, heads, length) in float32.

    Args:
        shape: (batch, heads, q_len, k_len); for packed sequences (sequences, heads, max_seqlen_q, max_seqlen_k).
        lengths: the rows of q and of k.
        size: the rows and columns of a band's tiles.
    """
    tensor = aux.score_aux[term.position]
    if term.computed_by == "pair":
        full = [size if axis in term.axes else 1 for axis, size in zip(AXES, shape, strict=True)]
        return torch.empty(full, dtype=tensor.dtype, device=tensor.device)
    batch, heads, q_len, k_len = shape
    if term.computed_by == "distance":
        bands = num_bands(q_len, k_len, size)
        return torch.empty(batch, heads, bands, 2, size, dtype=torch.float32, device=tensor.device)
    batch = batch if aux.cu_seqlens_q is None else 1
    length = lengths[term.computed_by == "column"]
    return torch.empty(batch, heads, length, dtype=torch.float32, device=tensor.device)


def num_bands(q_len: int, k_len: int, size: int) -> int:
    """The diagonals of a matrix of square tiles."""
    return -(-q_len // size) - (-k_len // size) - 1


def reduce_buffer(term: Term, buffer: Tensor, shape: tuple[int, int, int, int], aux: Aux) -> Tensor:
    """The gradient of a captured tensor from the buffer that a pass has written."""
    tensor, name = aux.score_aux[term.position], term.computed_by
    if name == "pair":
        return buffer.reshape(tensor.shape).to(tensor.dtype)
    sums = sum_bands(buffer, *shape[2:]) if name == "distance" else buffer
    summed = [axis for axis, left in enumerate(AXES_LEFT[name]) if left not in term.axes]
    starts = aux.cu_seqlens_k if name == "column" else aux.cu_seqlens_q
    if starts is not None and name != "distance" and term.axes & {"batch", name}:
        sums = by_sequence(sums[0], starts, shape[2 + (name == "column")] if name in term.axes else None)
    sums = sums.sum(summed, keepdim=True) if summed else sums
    if name == "distance":
        sums = place_distances(sums, term.origin, shape[2], tensor.shape[-1])
    return sums.reshape(tensor.shape).to(tensor.dtype)


def sum_bands(bands: Tensor, q_len: int, k_len: int) -> Tensor:
    """The sum over the pairs of each distance from 1 - q_len to k_len - 1: (..., q_len + k_len - 1).

    Args:
        bands: (..., bands, 2, size), for each diagonal of square tiles, the lower left first: the sums of its diagonals
            with column - row from -size to -1, and from 0 to size - 1.
    """
    size = bands.shape[-1]
    # The second half of a band and the first half of the next one are of the same distances.
    blocks = F.pad(bands[..., 0, :], (0, 0, 0, 1)) + F.pad(bands[..., 1, :], (0, 0, 1, 0))
    first = -(-q_len // size) * size - (q_len - 1)
    return blocks.flatten(-2)[..., first : first + q_len + k_len - 1]


def place_distances(sums: Tensor, origin: int, q_len: int, length: int) -> Tensor:
    """`sum_bands` among ``length`` numbers of which ``origin`` is distance 0; 0 elsewhere."""
    before = origin - (q_len - 1)
    return F.pad(sums, (before, length - before - sums.shape[-1]))


def by_sequence(sums: Tensor, starts: Tensor, most: int | None) -> Tensor:
    """Sums (heads, length) of packed rows as (sequences, heads, most), or (sequences, heads, 1) if ``most`` is None.

    Rows of no sequence, and those from ``most`` on, are left out. No atomics, no synchronisation with the host.
    """
    length, count = sums.shape[-1], starts.numel() - 1
    starts = starts.long().clamp(0, length).cummax(0).values
    if most is None:
        offsets = torch.cat([starts[:1] * 0, starts[1:]])
        totals = torch.segment_reduce(sums.mT.double().contiguous(), "sum", offsets=offsets, axis=0, unsafe=True)
        return totals[..., None].to(sums.dtype)
    sequence, row = locate_rows(starts, torch.arange(length, device=sums.device))
    spread = sums.new_zeros(count + 1, most, sums.shape[0])
    spread[torch.where(row < most, sequence, count), row.clamp(max=most - 1)] = sums.mT
    return spread[:count].mT
