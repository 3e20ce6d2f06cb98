"""The band of visible pairs, and the tiles that hold any: they stand together so that they cannot disagree.

Row i sees the columns from i + left, with LEFT, to i + right, with RIGHT. A causal mask has a right edge, a sliding
window a left one too. Both may be negative: the first rows then see nothing. Without its flag an edge must be 0.
"""

import triton
import triton.language as tl

from ...call import BLOCK

BLOCK_SIZE: tl.constexpr = tl.constexpr(BLOCK)


@triton.jit
def visible(rows, columns, k_len, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether each row sees each column; the arguments broadcast."""
    seen = columns < k_len
    if RIGHT:
        seen = seen & (columns <= rows + right)
    if LEFT:
        seen = seen & (columns >= rows + left)
    return seen


@triton.jit
def key_ranges(
    first_row, k_len, left, right, ROWS: tl.constexpr, TILE_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """The columns that ROWS rows see, as three ranges that begin at whole tiles; the second needs no mask.

    Where one range begins is disguised from the compiler (``+ nothing``). It would otherwise compute the start of a
    loop, and an accumulator of zeros, on a second path where the loop before did not run; an accumulator that is set in
    two places makes ptxas run matrix instructions one after the other (C7515).
    """
    seen_by_all = k_len
    end = k_len
    if RIGHT:
        seen_by_all = tl.maximum(0, tl.minimum(k_len, first_row + right + 1))
        end = tl.maximum(0, tl.minimum(k_len, first_row + ROWS + right))
    whole = seen_by_all // TILE_K * TILE_K
    nothing = tl.minimum(k_len, 0)
    begin = whole * 0
    start = begin
    unmasked = begin
    if LEFT:
        begin = tl.maximum(0, first_row + left) // TILE_K * TILE_K
        seen_from = tl.maximum(0, first_row + ROWS - 1 + left)
        start = tl.minimum(tl.cdiv(seen_from, TILE_K), tl.cdiv(end, TILE_K)) * TILE_K
        unmasked = start + nothing
    return (begin, start), (unmasked, whole), (tl.maximum(start, whole) + nothing, end)


@triton.jit
def query_ranges(
    first_column, q_len, left, right, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):  # fmt: skip
    """The rows that see COLUMNS columns, as three ranges that begin at whole tiles; rows of the second see all."""
    begin = first_column * 0
    start = begin
    if RIGHT:
        begin = tl.maximum(0, first_column - right) // TILE_Q * TILE_Q
        sees_all = tl.maximum(0, first_column + COLUMNS - 1 - right)
        start = tl.minimum(tl.cdiv(sees_all, TILE_Q), tl.cdiv(q_len, TILE_Q)) * TILE_Q
    whole = q_len
    end = q_len
    if LEFT:
        end = tl.maximum(0, tl.minimum(q_len, first_column + COLUMNS - left))
        start = tl.minimum(start, tl.cdiv(end, TILE_Q) * TILE_Q)
        seen_by_all = tl.maximum(0, tl.minimum(q_len, first_column - left + 1))
        whole = tl.maximum(start, seen_by_all // TILE_Q * TILE_Q)
    return (begin, start), (start, whole), (whole, end)


@triton.jit
def block_list(blocks, head, first):
    """Address of the list of visible blocks next to the block of ``first``: see `cs336_systems.attention.blocks`."""
    one = tl.full((), 1, tl.int64)
    matrix = head.batch * (blocks[1] * one) + head.head * (blocks[2] * one)
    return blocks[0] + matrix + first // BLOCK_SIZE * blocks[3]


@triton.jit
def block_ranges(entry, TILE: tl.constexpr, cu_seqlens, first, length, to_visit):
    """The tiles of partly visible blocks and of wholly visible ones, by their number in the list.

    Of packed sequences those of both together, since the lists may be for other lengths: every tile needs a mask. There
    is no list for a tile whose ``first`` row or column is past the ``length`` of its sequence, or that has none
    ``to_visit``.
    """
    if cu_seqlens is None:
        partial = tl.load(entry) * (BLOCK_SIZE // TILE)
        whole = tl.load(entry + 1) * (BLOCK_SIZE // TILE)
        ranges = (0, partial), (partial, partial + whole)
    else:
        exists = (first < length) & (to_visit > 0)
        listed = tl.load(entry, mask=exists, other=0) + tl.load(entry + 1, mask=exists, other=0)
        ranges = ((0, listed * (BLOCK_SIZE // TILE)),)
    return ranges


@triton.jit
def tile_of(entry, number, TILE: tl.constexpr):
    """The first row or column of tile ``number`` of the list."""
    STEPS: tl.constexpr = BLOCK_SIZE // TILE
    number = tl.cast(number, tl.int32)
    return tl.load(entry + 2 + number // STEPS) * BLOCK_SIZE + number % STEPS * TILE
