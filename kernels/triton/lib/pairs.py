"""Pairs of a query row and a key column: which are visible, and which probabilities dropout keeps."""

from typing import NamedTuple

import triton
import triton.language as tl

from ...call import DROPOUT_BITS, PHILOX_ROUNDS
from .masks import visible

ROUNDS = tl.constexpr(PHILOX_ROUNDS)
LOWER_BITS = tl.constexpr(2**DROPOUT_BITS - 1)


class HeadInfo(NamedTuple):
    """The head that a program works on, and what its pairs depend on.

    Kernels construct it in place, because Triton 3.6 cannot return a tuple that holds None.

    batch, head: of q. batch_head: its number, row-major over both. q_len, k_len: rows and columns that exist. left,
    right: see `masks`. captured: what mask rules and what score rules captured, a tuple of two. seed: pointer to
    dropout's seed, or None. dropout_threshold: see `Options.dropout_threshold`.
    """

    batch: tl.tensor
    head: tl.tensor
    batch_head: tl.tensor
    q_len: tl.tensor
    k_len: tl.tensor
    left: tl.tensor
    right: tl.tensor
    captured: tl.tuple
    seed: tl.tensor
    dropout_threshold: tl.tensor


@triton.jit
def clamped(rows, columns, head, CHECK_COLUMNS: tl.constexpr):
    """The nearest rows, and with CHECK_COLUMNS columns, that exist: what rules captured has elements for no others."""
    rows = tl.minimum(rows, tl.maximum(head.q_len - 1, 0))
    if CHECK_COLUMNS:
        columns = tl.minimum(columns, tl.maximum(head.k_len - 1, 0))
    return rows, columns


@triton.jit
def visible_pairs(rows, columns, head, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr):
    """Whether each row sees each column, by the band and by the mask rules MASK."""
    seen = visible(rows, columns, head.k_len, head.left, head.right, LEFT, RIGHT)
    if MASK is not None:
        row, column = clamped(rows, columns, head, True)
        seen = seen & MASK(head.batch, head.head, row, column, head.captured[0])
    return seen


@triton.jit
def keep_mask(first_row, first_column, head, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which probabilities of a tile dropout keeps: each by its own random number, the same for all tile sizes.

    Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) makes four words from the counter
    (column // 16 * 2 + column % 8 // 4, row, batch_head, 0). A pair's number is in half column % 2 of word
    column // 8 % 2 * 2 + column // 2 % 2. The tile is (COLUMNS, ROWS) if TRANSPOSED, otherwise (ROWS, COLUMNS); its
    first column is a multiple of 16.
    """
    if TRANSPOSED:
        # Each thread computes all eight and uses one. Exchanging them would synchronise threads between the matrix
        # instructions of this pass, which then run one after the other (C7515).
        columns = first_column + tl.arange(0, COLUMNS)[:, None] + tl.zeros([1, ROWS], tl.int32)
        rows = first_row + tl.arange(0, ROWS)[None, :] + columns * 0
        first, second, third, fourth = random_words(columns // 16 * 2 + columns % 8 // 4, rows, head)
        of_first = columns // 2 % 2 == 0
        word = tl.where(columns // 8 % 2 == 0, tl.where(of_first, first, second), tl.where(of_first, third, fourth))
        keep = is_kept(word >> (columns % 2 * 16).to(tl.uint32), head)
    else:
        counters = first_column // 8 + tl.arange(0, COLUMNS // 8)[None, :] + tl.zeros([ROWS, 1], tl.int32)
        rows = first_row + tl.arange(0, ROWS)[:, None] + counters * 0
        first, second, third, fourth = random_words(counters, rows, head)
        upper = tl.join(kept_halves(first, head), kept_halves(third, head))
        lower = tl.join(kept_halves(second, head), kept_halves(fourth, head))
        # The last four axes are bits 2, 0, 3 and 1 of a column's number.
        keep = tl.reshape(tl.join(upper, lower), (ROWS, COLUMNS // 16, 2, 2, 2, 2))
        keep = tl.permute(keep, (0, 1, 4, 2, 5, 3))
        keep = tl.reshape(keep, (ROWS, COLUMNS)) != 0
    return keep


@triton.jit
def kept_halves(words, head):
    """`is_kept` of both numbers of each word, as bytes: they are exchanged between threads."""
    return tl.join(is_kept(words, head).to(tl.int8), is_kept(words >> 16, head).to(tl.int8))


@triton.jit
def random_words(counters, rows, head):
    """Four random words of 32 bits for each counter and row."""
    zero = counters * 0
    return tl.philox(tl.load(head.seed), counters, rows, head.batch_head.to(tl.int32) + zero, zero, ROUNDS)


@triton.jit
def is_kept(number, head):
    """Whether dropout keeps the probability with the random number in the lower bits of a word."""
    return (number & LOWER_BITS).to(tl.int32, bitcast=True) >= head.dropout_threshold
