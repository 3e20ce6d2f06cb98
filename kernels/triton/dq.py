"""The backward's pass over tiles of query rows: it gathers dQ, and on the way what the other passes read of rows."""

import triton
import triton.language as tl

from .addresses import matrix
from .gradients import added_up, row_lse_of, score_gradient, weights_and_slopes, zeros_for
from .masks import block_list, block_ranges, key_ranges, tile_of
from .operands import product, split
from .pairs import Place, kept_pairs
from .sequences import NUMBERS, length_for, sequences_of, tile_of_program
from .slices import load_slice, products_of_rows, row_sums_of_products, store_slice
from .softmax import lowered
from .units import TOP, scales_of, unit_of


@triton.jit
def dq_step(
    dq_tile,
    sums,
    q_tile,
    queries,
    dout_tile,
    douts,
    lse,
    delta,
    keys,
    values,
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
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    SUMMED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add what one tile of keys contributes to dQ, and to the sums over columns of the terms SUMMED."""
    k_tile = load_slice(keys, first_column, tl.program_id(1) * BLOCK_D, TILE_K, BLOCK_D, HEAD_DIM, MASKED)
    v_tile = load_slice(values, first_column, 0, TILE_K, BLOCK_DV, V_HEAD_DIM, MASKED)
    rows = first_row + tl.arange(0, TILE_Q)[:, None]
    columns = first_column + tl.arange(0, TILE_K)[None, :]
    products = products_of_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, TILE_Q, TILE_K, BLOCK_D, HEAD_DIM
    )
    weights, slopes, terms = weights_and_slopes(
        products, rows, columns, lse[:, None], scales, place,
        LEFT, RIGHT, MASKED, MASK, SCORE, SHIFT, MASKED,
    )  # fmt: skip
    dweights = products_of_rows(
        dout_tile, douts, first_row, v_tile, values, first_column, TILE_Q, TILE_K, BLOCK_DV, V_HEAD_DIM
    )
    if place.seed is not None:
        dweights = tl.where(kept_pairs(first_row, first_column, place, TILE_Q, TILE_K, False), dweights, 0.0)
    gradient = score_gradient(weights, dweights, delta[:, None], scales)
    sums = added_up(sums, gradient, terms, SUMMED, 1)
    gradient = gradient * slopes
    return product(split(gradient, k_tile), k_tile, dq_tile), sums


@triton.jit(do_not_specialize=NUMBERS)
def dq_kernel(
    q,
    k,
    v,
    q_statistics,
    k_statistics,
    v_statistics,
    dout_statistics,
    dlse_bound,
    out,
    dout,
    dlse,
    lse,
    lowered_lse,
    delta,
    dq,
    sums,
    seed,
    captured,
    blocks,
    packed,
    q_sizes,
    kv_sizes,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dq_strides,
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
    SUMMED: tl.constexpr,
    TO_THE_END: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of q, tile of its rows), and slice of its columns (see `slices`).

    Also writes delta and the `lowered` log-sum-exps, which the other passes read.

    delta is rowsum(dout * out) - dlse: a gradient of the log-sum-exp reaches every score in proportion to its weight.
    ``score_scale`` is ``scale`` * log2(e); ``distances`` lead from q, k, v and dout to their further parts. ``sums``
    are where the gradients of the terms SUMMED go, summed over columns, a number for each row; see `pairs` for the
    rest.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    index, sequence, first_row = tile_of_program(tl.program_id(0), packed, 0, sequences, q_len, TILE_Q, RIGHT)
    own = sequences_of(packed, 0, sequence, sequences, q_len, k_len, most_rows, most_columns, TO_THE_END)
    kv_index = index // group
    place = Place(
        index // heads + sequence, index % heads, index + sequence * heads, own.rows, own.columns,
        left + own.shift, right + own.shift, captured, seed, threshold,
    )  # fmt: skip
    scales = scales_of(
        q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, kv_index, scale, score_scale,
        1.0 if seed is None else kept_scale, steepest,
    )  # fmt: skip
    keys = matrix(k, kv_index, kv_sizes, k_strides, own.k, distances[1], UNITS[1])
    values = matrix(v, kv_index, kv_sizes, v_strides, own.k, distances[2], UNITS[2])
    queries = matrix(q, index, q_sizes, q_strides, own.q, distances[0], UNITS[0])
    douts = matrix(dout, index, q_sizes, dout_strides, own.q, distances[3], UNITS[4])
    outs = matrix(out, index, q_sizes, out_strides, own.q, (), UNITS[3])
    dout_tile = load_slice(douts, first_row, 0, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_delta = row_sums_of_products(outs, dout_tile, douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM)
    row_delta *= unit_of(dout_statistics, kv_index)
    rows = first_row + tl.arange(0, TILE_Q)
    row_offsets = tl.cast(index, tl.int64) * q_len + own.q.first
    if dlse is not None:
        row_delta -= tl.load(dlse + row_offsets + rows, mask=rows < own.q.length, other=0.0)
    tl.store(delta + row_offsets + rows, row_delta, mask=rows < own.q.length)
    row_lse = lowered(row_lse_of(lse + row_offsets, rows, own.q.length))
    # The other passes read it as the forward writes one: -inf for rows that see nothing.
    low = tl.where(row_lse == float("inf"), float("-inf"), row_lse)
    tl.store(lowered_lse + row_offsets + rows, low, mask=rows < own.q.length)
    q_tile = load_slice(queries, first_row, 0, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dq_tile = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    row_sums = zeros_for(TILE_Q, SUMMED)
    k_rows = length_for(packed, first_row, own.q, own.columns)
    ranges = key_ranges(first_row, k_rows, place.left, place.right, TILE_Q, TILE_K, LEFT, RIGHT)
    entry = None
    if blocks is not None:
        entry = block_list(blocks, place, first_row)
        ranges = block_ranges(entry, TILE_K)
    elif MASK is not None:
        ranges = ((ranges[0][0], ranges[2][1]),)
    for part in tl.static_range(0 if LEFT or MASK is not None else 1, len(ranges)):
        for position in range(ranges[part][0], ranges[part][1], TILE_K if blocks is None else 1):
            first_column = position if blocks is None else tile_of(entry, position, TILE_K)
            dq_tile, row_sums = dq_step(
                dq_tile, row_sums, q_tile, queries, dout_tile, douts, row_lse, row_delta, keys, values, first_row,
                first_column, place, scales, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, LEFT, RIGHT,
                part != 1, MASK, SCORE, SUMMED, SHIFT,
            )  # fmt: skip
    target = matrix(dq, index, q_sizes, dq_strides, own.q, (), UNITS[5])
    store_slice(target, dq_tile * scales.dq, first_row, tl.program_id(1) * BLOCK_D, TILE_Q, BLOCK_D, HEAD_DIM)
    for number in tl.static_range(len(SUMMED)):
        tl.store(sums[number] + row_offsets + rows, row_sums[number] * scales.step, mask=rows < own.q.length)
