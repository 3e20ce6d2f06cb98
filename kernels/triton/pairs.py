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
def kept_pairs(first_row, first_column, place, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DOWN: tl.constexpr):
    """Whether dropout keeps the weight of each pair of a tile: by a random number of its own, whatever the tiles.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes four at once, of four neighbouring
    columns; the counter is (column // 4, row, matrix, 0). The tile is (COLUMNS, ROWS) with DOWN, else (ROWS, COLUMNS);
    its first column is a multiple of 4.
    """
    if DOWN:
        # Each thread makes the four and takes its own: to exchange them, threads would wait for each other between the
        # matrix instructions of this pass, which are then run one after the other (C7515).
        columns = first_column + tl.arange(0, COLUMNS)[:, None] + tl.zeros([1, ROWS], tl.int32)
        rows = first_row + tl.arange(0, ROWS)[None, :] + columns * 0
        first, second, third, fourth = random_words(columns // 4, rows, place)
        word = columns % 4
        number = tl.where(word < 2, tl.where(word == 0, first, second), tl.where(word == 2, third, fourth))
        keep = is_kept(number, place)
    else:
        counters = first_column // 4 + tl.arange(0, COLUMNS // 4)[None, :] + tl.zeros([ROWS, 1], tl.int32)
        rows = first_row + tl.arange(0, ROWS)[:, None] + counters * 0
        first, second, third, fourth = random_words(counters, rows, place)
        # As bytes, because they change threads on the way.
        even = tl.join(is_kept(first, place).to(tl.int8), is_kept(third, place).to(tl.int8))
        odd = tl.join(is_kept(second, place).to(tl.int8), is_kept(fourth, place).to(tl.int8))
        keep = tl.reshape(tl.join(even, odd), (ROWS, COLUMNS)) != 0
    return keep


@triton.jit
def random_words(counters, rows, place):
    """Four random numbers of 32 bits for each counter and row."""
    zero = counters * 0
    return tl.philox(tl.load(place.seed), counters, rows, place.matrix.to(tl.int32) + zero, zero)


@triton.jit
def is_kept(number, place):
    """Whether a random number keeps a weight."""
    return (number >> 1).to(tl.int32, bitcast=True) >= place.threshold
