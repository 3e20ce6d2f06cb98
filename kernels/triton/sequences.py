"""Packed sequences: several in the rows of one matrix, one after another, and which of them a program works on.

``packed`` is None where each matrix holds one sequence. Else it is a tuple: where the first rows of q's sequences are
listed, and where those of k's, one more than there are sequences, ending with the end of the last (``cu_seqlens``).
Lengths are on the device alone, so the grid is for any: as many programs for tiles as could be needed. Numbers out of
order are taken for what is nearest within the matrix: a result may then be any, but nothing is read beyond.

The rows after the last sequence belong to one more, which sees nothing, so that all rows are written.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Span(NamedTuple):
    """The rows of a matrix that one sequence has: the first of them, and how many."""

    first: tl.tensor
    length: tl.tensor


class Sequences(NamedTuple):
    """A sequence of q, and the one of k that it sees.

    rows, columns: the lengths, cut at what the call promised: captured tensors may have no more.
    shift: how far row i's own column is from i.
    """

    q: Span
    k: Span
    rows: tl.tensor
    columns: tl.tensor
    shift: tl.tensor


NUMBERS = ["q_len", "k_len", "left", "right", "heads", "threshold", "sequences", "most_rows", "most_columns"]
"""Arguments of kernels that change from call to call: nothing is compiled anew for them."""


@triton.jit
def whole(length):
    """All rows of a matrix."""
    return Span(tl.full((), 0, tl.int32), length)


@triton.jit
def slot_of(starts, sequence, TILE: tl.constexpr):
    """The number of a sequence's first tile among those of its matrix; what tiles are cut short by is left free."""
    start = tl.maximum(tl.load(starts + sequence).to(tl.int32), 0)
    return tl.where(sequence == 0, 0, start // TILE + sequence)


@triton.jit
def sequence_of(starts, tile, sequences, TILE: tl.constexpr):
    """The sequence, counted on after the last, that has a tile, by its number among those of the matrix."""
    sequence = tile * 0
    beyond = sequence + sequences + 1
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        later = slot_of(starts, middle, TILE) > tile
        beyond = tl.where(later, middle, beyond)
        sequence = tl.where(later, sequence, middle)
    return sequence


@triton.jit
def tile_of_program(program, packed, OF: tl.constexpr, sequences, length, TILE: tl.constexpr, BACKWARDS: tl.constexpr):
    """The matrix, the sequence in it, and the first row, counted from the sequence's own, of a program's tile.

    OF says of which tensor: 0 for q, 1 for k. ``length`` is that of a matrix.
    """
    tiles = tl.cdiv(length, TILE)
    if packed is not None:
        tiles = length // TILE + sequences + 1
    index = program // tiles
    tile = program % tiles
    if BACKWARDS:
        # The last rows see the most keys: starting with them leaves the short programs to fill the gaps at the end.
        tile = tiles - 1 - tile
    sequence = index * 0
    if packed is not None:
        sequence = sequence_of(packed[OF], tile, sequences, TILE)
        tile -= slot_of(packed[OF], sequence, TILE)
    return index, sequence, tile * TILE


@triton.jit
def span_of(starts, sequence, sequences, length):
    """The rows of a sequence in a matrix of ``length`` rows; what is left of them after the last."""
    first = tl.load(starts + sequence).to(tl.int32)
    last = tl.load(starts + tl.minimum(sequence + 1, sequences)).to(tl.int32)
    first = tl.where(sequence == 0, 0, tl.minimum(tl.maximum(first, 0), length))
    last = tl.where(sequence == sequences, length, tl.minimum(tl.maximum(last, first), length))
    return Span(first, last - first)


@triton.jit
def sequences_of(
    packed, OF: tl.constexpr, sequence, sequences, q_len, k_len, most_rows, most_columns, TO_THE_END: tl.constexpr
):
    """The sequences of q and k with one number, in matrices of q_len and k_len rows.

    What comes after the last has rows of the tensor OF alone (see `tile_of_program`). TO_THE_END says that the last
    row's own column is the last, not the first row's the first.
    """
    queries = whole(q_len)
    keys = whole(k_len)
    rows = q_len
    columns = k_len
    shift = tl.full((), 0, tl.int32)
    if packed is not None:
        queries = span_of(packed[0], sequence, sequences, q_len)
        keys = span_of(packed[1], sequence, sequences, k_len)
        # Of the other tensor, that is.
        if OF == 0:
            keys = Span(keys.first, tl.where(sequence == sequences, 0, keys.length))
        else:
            queries = Span(queries.first, tl.where(sequence == sequences, 0, queries.length))
        rows = tl.minimum(queries.length, most_rows)
        columns = tl.minimum(keys.length, most_columns)
        if TO_THE_END:
            shift = keys.length - queries.length
    return Sequences(queries, keys, rows, columns, shift)


@triton.jit
def length_for(packed, first, own, length):
    """The length that a tile which begins at ``first`` of the span ``own`` has to visit: 0 if that is past its end."""
    if packed is not None:
        length = tl.where(first < own.length, length, 0)
    return length
