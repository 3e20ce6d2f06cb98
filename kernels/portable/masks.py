"""Which pairs of a query row and a key column are visible, and which tiles hold any.

A predicate and the tile ranges that follow from it stand side by side so that they cannot disagree. ``diagonal`` is the
column of the last key that row 0 sees: 0 when the mask aligns the first query with the first key, ``k_len - q_len``
when it aligns the last ones. It may be negative: then the first rows see nothing.
"""

import triton
import triton.language as tl


@triton.jit
def visible(rows, columns, k_len, diagonal, CAUSAL: tl.constexpr):
    """Whether each row sees each column; the arguments broadcast."""
    seen = columns < k_len
    if CAUSAL:
        seen = seen & (columns <= rows + diagonal)
    return seen


@triton.jit
def key_range(first_row, k_len, diagonal, ROWS: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr):
    """For ROWS rows: columns [0, whole) need no mask and fill whole tiles, [whole, end) need it, the rest is hidden."""
    seen_by_all = k_len
    end = k_len
    if CAUSAL:
        seen_by_all = tl.maximum(0, tl.minimum(k_len, first_row + diagonal + 1))
        end = tl.maximum(0, tl.minimum(k_len, first_row + ROWS + diagonal))
    whole = seen_by_all // TILE_K * TILE_K
    return whole, end


@triton.jit
def query_range(first_column, q_len, diagonal, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, CAUSAL: tl.constexpr):
    """For COLUMNS columns: rows [start, whole) need the mask, [whole, q_len) see all; both start on whole tiles."""
    # Rounding a zero-dimensional tensor keeps one type on every path.
    start = first_column * 0
    whole = start
    if CAUSAL:
        start = tl.maximum(0, first_column - diagonal) // TILE_Q * TILE_Q
        sees_all = tl.maximum(0, first_column + COLUMNS - 1 - diagonal)
        whole = tl.minimum(tl.cdiv(sees_all, TILE_Q) * TILE_Q, tl.cdiv(q_len, TILE_Q) * TILE_Q)
    return start, whole
