"""Which pairs of a query row and a key column are visible, and which tiles hold any.

A predicate and the tile ranges that follow from it stand side by side so that they cannot disagree. ``diagonal`` is the
column of the last key that row 0 sees: 0 when the mask aligns the first query with the first key, ``k_len - q_len``
when it aligns the last ones. It may be negative: then the first rows see nothing. Without a mask it must be 0.
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
    """For ROWS rows: columns [0, whole) need no mask and fill whole tiles, [edge, end) need it, the rest is hidden.

    ``edge`` is ``whole``, in a way that the compiler cannot tell. It would keep what the second loop starts with from
    the first, and find it anew, along with an accumulator of zeros, where the first did not run; an accumulator that is
    set in two places makes ptxas run each matrix instruction to its end before the next (C7515).
    """
    seen_by_all = k_len
    end = k_len
    if CAUSAL:
        seen_by_all = tl.maximum(0, tl.minimum(k_len, first_row + diagonal + 1))
        end = tl.maximum(0, tl.minimum(k_len, first_row + ROWS + diagonal))
    whole = seen_by_all // TILE_K * TILE_K
    edge = whole
    if not CAUSAL:
        edge += diagonal  # which is 0 without a mask
    return whole, edge, end


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
