"""Packed sequences: the sequence of q and of k that a program works on. See `kernels.lib.varlen` for the layout.

``cu_seqlens`` is None where each matrix holds one sequence, otherwise the tuple (cu_seqlens_q, cu_seqlens_k).
Everything else in a kernel counts rows and columns from the beginning of the sequence.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...lib.varlen import Span, sequence_of, slot_of, span_of

UNSPECIALIZED = [
    "q_len", "k_len", "left", "right", "heads", "dropout_threshold", "num_seqs", "max_seqlen_q", "max_seqlen_k",
]  # fmt: skip
"""Arguments that change from call to call: Triton compiles no new kernel for their values."""


class Sequences(NamedTuple):
    """A sequence of q and the one of k that it sees.

    q_len, k_len: their lengths, at most max_seqlen_q and max_seqlen_k: captured tensors may have no more elements.
    shift: the diagonal passes through (row i, column i + shift).
    """

    q: Span
    k: Span
    q_len: tl.tensor
    k_len: tl.tensor
    shift: tl.tensor


@triton.jit
def all_rows(length):
    """All rows of a matrix."""
    return Span(tl.full((), 0, tl.int32), length)


@triton.jit
def program_tile(program, cu_seqlens, OF: tl.constexpr, num_seqs, length, TILE: tl.constexpr, REVERSE: tl.constexpr):
    """The batch-head, the sequence in its matrix, and the tile's first row in that sequence.

    OF: 0 for a tile of q, 1 for a tile of k. ``length``: the rows of a matrix. REVERSE: start with the last tiles.
    """
    tiles = tl.cdiv(length, TILE)
    if cu_seqlens is not None:
        tiles = length // TILE + num_seqs + 1
    batch_head = program // tiles
    tile = program % tiles
    if REVERSE:
        # With a causal mask the last rows take longest: starting with them fills the gaps at the end.
        tile = tiles - 1 - tile
    sequence = batch_head * 0
    if cu_seqlens is not None:
        sequence = sequence_of(cu_seqlens[OF], tile, num_seqs, TILE)
        tile -= slot_of(cu_seqlens[OF], sequence, TILE)
    return batch_head, sequence, tile * TILE


@triton.jit
def sequences_of(
    cu_seqlens, OF: tl.constexpr, sequence, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k,
    BOTTOM_RIGHT: tl.constexpr,
):  # fmt: skip
    """The sequences with this number. The rows after the last one have rows of the tensor OF alone."""
    q = all_rows(q_len)
    k = all_rows(k_len)
    rows = q_len
    columns = k_len
    shift = tl.full((), 0, tl.int32)
    if cu_seqlens is not None:
        q = span_of(cu_seqlens[0], sequence, num_seqs, q_len)
        k = span_of(cu_seqlens[1], sequence, num_seqs, k_len)
        if OF == 0:
            k = Span(k.first, tl.where(sequence == num_seqs, 0, k.length))
        else:
            q = Span(q.first, tl.where(sequence == num_seqs, 0, q.length))
        rows = tl.minimum(q.length, max_seqlen_q)
        columns = tl.minimum(k.length, max_seqlen_k)
        if BOTTOM_RIGHT:
            shift = k.length - q.length
    return Sequences(q, k, rows, columns, shift)


@triton.jit
def length_to_visit(cu_seqlens, first, seq, length):
    """``length``, or 0 for a tile whose first row is past the end of its sequence ``seq``."""
    if cu_seqlens is not None:
        length = tl.where(first < seq.length, length, 0)
    return length
