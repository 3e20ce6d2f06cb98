"""The gradient of a captured tensor that has an element for each pair, such as a bias, or one for each distance.

A tile of it is what the tiles of score gradients at that place add up to, over the batch entries and heads that share
the tensor. One program gathers it, so nothing is added atomically and nothing quadratic is written but the result.

For distances there is one program for each diagonal of tiles, a band. Where tiles are square, an element has the same
distance in all of them, so these are added up too, and in the end the diagonals of what comes out. `diagonals` puts
together what neighbouring bands have in common.
"""

import triton
import triton.language as tl

from .addresses import matrix
from .gradients import row_lse_of, score_gradient, weights_and_slopes
from .pairs import Place, kept_pairs
from .sequences import NUMBERS, sequences_of
from .slices import load_slice, products_of_rows
from .units import TOP, scales_of


@triton.jit
def pair_step(
    total,
    queries,
    keys,
    values,
    douts,
    lse,
    delta,
    first_row,
    first_column,
    place,
    scales,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    TERM: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add a tile of score gradients, times the term TERM of each pair."""
    across = first_row + tl.arange(0, TILE_Q)
    rows = across[:, None]
    columns = first_column + tl.arange(0, TILE_K)[None, :]
    q_tile = load_slice(queries, first_row, 0, TILE_Q, BLOCK_D, HEAD_DIM, True)
    k_tile = load_slice(keys, first_column, 0, TILE_K, BLOCK_D, HEAD_DIM, True)
    products = products_of_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, TILE_Q, TILE_K, BLOCK_D, HEAD_DIM
    )
    row_lse = row_lse_of(lse, across, queries.rows)
    row_delta = tl.load(delta + across, mask=across < queries.rows, other=0.0)
    weights, _, terms = weights_and_slopes(
        products, rows, columns, row_lse[:, None], scales, place,
        LEFT, RIGHT, True, MASK, SCORE, SHIFT, True,
    )  # fmt: skip
    dout_tile = load_slice(douts, first_row, 0, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    v_tile = load_slice(values, first_column, 0, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
    dweights = products_of_rows(
        dout_tile, douts, first_row, v_tile, values, first_column, TILE_Q, TILE_K, BLOCK_DV, V_HEAD_DIM
    )
    if place.seed is not None:
        dweights = tl.where(kept_pairs(first_row, first_column, place, TILE_Q, TILE_K, False), dweights, 0.0)
    return total + score_gradient(weights, dweights, row_delta[:, None], scales) * terms[TERM] * scales.step


@triton.jit
def gathered_place(q_len, k_len, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, DIAGONAL: tl.constexpr):
    """What a program gathers: the number of its matrix, its first row and column, and how many rows it goes along."""
    tiles_q = tl.cdiv(q_len, TILE_Q)
    tiles_k = tl.cdiv(k_len, TILE_K)
    if DIAGONAL:
        bands = tiles_q + tiles_k - 1
        own = tl.program_id(0) // bands
        ahead = tl.program_id(0) % bands - tiles_q + 1
        row_tile = tl.maximum(0, -ahead)
        column_tile = tl.maximum(0, ahead)
        reach = tl.minimum(tiles_q - row_tile, tiles_k - column_tile) * TILE_Q
    else:
        own = tl.program_id(0) // tiles_k // tiles_q
        row_tile = tl.program_id(0) // tiles_k % tiles_q
        column_tile = tl.program_id(0) % tiles_k
        reach = TILE_Q
    return own, row_tile * TILE_Q, column_tile * TILE_K, reach


@triton.jit
def diagonal_sums(tile, SIZE: tl.constexpr):
    """A square tile summed along its diagonals: those with column - row from -SIZE to -1, and from 0 to SIZE - 1."""
    ends = tl.arange(0, SIZE)[None, :] + tl.arange(0, SIZE)[:, None]
    # Each row is rotated by its number: what was on two diagonals, SIZE apart, is then in one column.
    upright = tl.gather(tile, ends % SIZE, 1)
    wrapped = ends >= SIZE
    return tl.sum(tl.where(wrapped, upright, 0.0), 0), tl.sum(tl.where(wrapped, 0.0, upright), 0)


@triton.jit(do_not_specialize=[*NUMBERS, "shared_batches", "shared_heads"])
def pair_gradient_kernel(
    q,
    k,
    v,
    q_statistics,
    k_statistics,
    v_statistics,
    dout_statistics,
    dlse_bound,
    dout,
    lse,
    delta,
    target,
    seed,
    captured,
    packed,
    q_sizes,
    kv_sizes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    target_strides,
    distances,
    group,
    heads,
    q_len,
    k_len,
    left,
    right,
    sequences,
    most_rows,
    most_columns,
    scale,
    score_scale,
    kept_scale,
    threshold,
    steepest,
    shared_batches,
    shared_heads,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    TERM: tl.constexpr,
    DIAGONAL: tl.constexpr,
    TO_THE_END: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of the target, tile of it). The target is (batch, heads, q_len, k_len).

    Of packed sequences it is (sequences, heads, most_rows, most_columns).

    With DIAGONAL one for each (matrix, band), from that of the last row and the first column on; tiles are square, and
    the target is (batch, heads, bands, 2, TILE_Q), contiguous, in float32. Each matrix is shared by ``shared_batches``
    entries of the batch and ``shared_heads`` heads: 1, or all. TERM is the term whose gradient this is; see `dq`.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    target_rows = q_len if packed is None else most_rows
    target_columns = k_len if packed is None else most_columns
    own, start_row, start_column, reach = gathered_place(target_rows, target_columns, TILE_Q, TILE_K, DIAGONAL)
    own_heads = heads // shared_heads
    first_batch = own // own_heads
    first_head = own % own_heads
    total = tl.zeros([TILE_Q, TILE_K], tl.float32)
    members = shared_batches * shared_heads
    if RIGHT and packed is None:
        members = tl.where(start_column > start_row + TILE_Q - 1 + right, 0, members)
    if LEFT and packed is None:
        members = tl.where(start_column + TILE_K - 1 < start_row + left, 0, members)
    for member in range(members):
        batch = first_batch + member // shared_heads
        head = first_head + member % shared_heads
        index = head if packed is not None else batch * heads + head
        kv_index = index // group
        here = sequences_of(packed, 0, batch, sequences, q_len, k_len, most_rows, most_columns, TO_THE_END)
        place = Place(
            batch, head, batch * heads + head, here.rows, here.columns,
            left + here.shift, right + here.shift, captured, seed, threshold,
        )  # fmt: skip
        scales = scales_of(
            q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, kv_index, scale, score_scale,
            1.0 if seed is None else kept_scale, steepest,
        )  # fmt: skip
        keys = matrix(k, kv_index, kv_sizes, k_strides, here.k, distances[1], UNITS[1])
        values = matrix(v, kv_index, kv_sizes, v_strides, here.k, distances[2], UNITS[2])
        queries = matrix(q, index, q_sizes, q_strides, here.q, distances[0], UNITS[0])
        douts = matrix(dout, index, q_sizes, dout_strides, here.q, distances[3], UNITS[3])
        row_offset = tl.cast(index, tl.int64) * q_len + here.q.first
        for along in range(0, reach, TILE_Q):
            total = pair_step(
                total, queries, keys, values, douts, lse + row_offset, delta + row_offset, start_row + along,
                start_column + along, place, scales, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K,
                LEFT, RIGHT, MASK, SCORE, TERM, SHIFT,
            )  # fmt: skip
    down = tl.arange(0, TILE_Q)[:, None]
    across = tl.arange(0, TILE_K)[None, :]
    one = tl.full((), 1, tl.int64)
    if DIAGONAL:
        before, after = diagonal_sums(total, TILE_Q)
        start = target + tl.program_id(0) * (2 * TILE_Q * one) + tl.arange(0, TILE_Q)
        tl.store(start, before)
        tl.store(start + TILE_Q, after)
    else:
        start = target + first_batch * (target_strides[0] * one) + first_head * (target_strides[1] * one)
        start += start_row * (target_strides[2] * one) + start_column * (target_strides[3] * one)
        offsets = down * (target_strides[2] * one) + across * (target_strides[3] * one)
        exist = (start_row + down < target_rows) & (start_column + across < target_columns)
        tl.store(start + offsets, total.to(target.dtype.element_ty), mask=exist)
