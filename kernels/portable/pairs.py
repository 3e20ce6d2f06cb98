"""What becomes of pairs of a query row and a key column: which are hidden, and which weights are dropped."""

from typing import NamedTuple

import triton
import triton.language as tl

from .masks import visible


class Place(NamedTuple):
    """Which matrices a program works on, and what it must know of their pairs.

    Kernels make it on the spot: Triton 3.6 cannot return a tuple with None in it.

    batch, head: of q. matrix: its number, row-major over both. q_len, k_len: how many rows and columns exist. left,
    right: see `masks`. captured: what the rules of the mask and those of scores captured, a tuple of two. seed: where
    the two halves of dropout's seed are, or None; threshold: see `settings`.
    """

    batch: tl.tensor
    head: tl.tensor
    matrix: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    left: tl.tensor
    right: tl.tensor
    captured: tl.tuple
    seed: tl.tensor
    threshold: tl.tensor


@triton.jit
def existing(rows, columns, place, CHECK_COLUMNS: tl.constexpr):
    """Whether each pair's row, and with CHECK_COLUMNS its column, is not past the end. One of each broadcasts."""
    exists = (rows < place.q_len) & tl.full(columns.shape, 1, tl.int1)
    if CHECK_COLUMNS:
        exists = exists & (columns < place.k_len)
    return exists


@triton.jit
def seen_pairs(rows, columns, exists, place, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr):
    """Whether each row sees each column, by the band and by the mask's rules."""
    seen = visible(rows, columns, place.k_len, place.left, place.right, LEFT, RIGHT)
    if MASK is not None:
        seen = seen & MASK(place.batch, place.head, rows, columns, exists, place.captured[0])
    return seen


@triton.jit
def kept_pairs(rows, columns, place):
    """Whether dropout keeps the weight of each pair: by a random number of its own, whatever the tiles.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes four at once, of four neighbouring
    columns; the counter is (column // 4, row, matrix, 0).
    """
    columns = columns + rows * 0
    counter = columns // 4
    zero = counter * 0
    first, second, third, fourth = tl.philox(
        tl.load(place.seed), counter, rows + zero, place.matrix.to(tl.int32) + zero, zero
    )
    word = columns % 4
    number = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
    return (number >> 1).to(tl.int32, bitcast=True) >= place.threshold
