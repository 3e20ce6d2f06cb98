"""Packed sequences on the device: which sequence a program's tile belongs to, and which rows that sequence has.

``starts`` are cumulative lengths (``cu_seqlens``): one more than there are sequences, the last one the end of the last
sequence. Lengths are known on the device alone, so the grid is the worst case. Sequence i begins at tile
``starts[i] // TILE + i``. Values that decrease or exceed the matrix are clamped: the result is then undefined, but no
address is outside of the matrix. The rows after the last sequence count as one more sequence, so that they are written.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Span(NamedTuple):
    """The rows of one sequence in its matrix: the first one, and how many."""

    first: tl.tensor
    length: tl.tensor


@triton.jit
def slot_of(starts, sequence, TILE: tl.constexpr):
    """The first tile of a sequence among the tiles of its matrix. Tiles that no sequence needs stay empty."""
    start = tl.maximum(tl.load(starts + sequence).to(tl.int32), 0)
    return tl.where(sequence == 0, 0, start // TILE + sequence)


@triton.jit
def sequence_of(starts, tile, num_seqs, TILE: tl.constexpr):
    """The sequence that a tile belongs to, by bisection; num_seqs for the rows after the last one."""
    sequence = tile * 0
    beyond = sequence + num_seqs + 1
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        later = slot_of(starts, middle, TILE) > tile
        beyond = tl.where(later, middle, beyond)
        sequence = tl.where(later, sequence, middle)
    return sequence


@triton.jit
def span_of(starts, sequence, num_seqs, length):
    """The rows of a sequence in a matrix of ``length`` rows; the rows after the last sequence for num_seqs."""
    first = tl.load(starts + sequence).to(tl.int32)
    last = tl.load(starts + tl.minimum(sequence + 1, num_seqs)).to(tl.int32)
    first = tl.where(sequence == 0, 0, tl.minimum(tl.maximum(first, 0), length))
    last = tl.where(sequence == num_seqs, length, tl.minimum(tl.maximum(last, first), length))
    return Span(first, last - first)
