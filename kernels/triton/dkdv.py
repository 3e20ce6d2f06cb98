"""The backward's pass over tiles of keys: it gathers dK and dV."""

import triton
import triton.language as tl

from .addresses import matrix
from .gradients import added_up, row_lse_of, score_gradient, weights_and_slopes, zeros_for
from .masks import block_list, block_ranges, query_ranges, tile_of
from .operands import product, split
from .pairs import Place, kept_pairs
from .sequences import NUMBERS, length_for, sequences_of, tile_of_program
from .slices import load_slice, products_of_rows, store_slice
from .units import TOP, scales_of


@triton.jit
def dkdv_step(
    dk_tile,
    dv_tile,
    sums,
    k_tile,
    keys,
    v_tile,
    values,
    queries,
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
    MASKED: tl.constexpr,
    MASK: tl.constexpr,
    SCORE: tl.constexpr,
    SUMMED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add what one tile of query rows contributes to dK, dV and the sums over rows of the terms SUMMED.

    Scores are transposed: keys down, queries across. Rows past the end have no weights, so only the edges of the band
    and rules need a mask.
    """
    across = first_row + tl.arange(0, TILE_Q)
    q_tile = load_slice(queries, first_row, tl.program_id(1) * BLOCK_D, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dout_tile = load_slice(douts, first_row, tl.program_id(1) * BLOCK_DV, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_lse = row_lse_of(lse, across, queries.rows)
    row_delta = tl.load(delta + across, mask=across < queries.rows, other=0.0)
    rows = across[None, :]
    columns = first_column + tl.arange(0, TILE_K)[:, None]
    products = products_of_rows(
        k_tile, keys, first_column, q_tile, queries, first_row, TILE_K, TILE_Q, BLOCK_D, HEAD_DIM
    )
    weights, slopes, terms = weights_and_slopes(
        products, rows, columns, row_lse[None, :], scales, place,
        LEFT, RIGHT, MASKED, MASK, SCORE, SHIFT, True,
    )  # fmt: skip
    kept = weights
    if place.seed is not None:
        keep = kept_pairs(first_row, first_column, place, TILE_Q, TILE_K, True)
        kept = tl.where(keep, weights, 0.0)
    dv_tile = product(split(kept, dout_tile), dout_tile, dv_tile)
    dweights = products_of_rows(
        v_tile, values, first_column, dout_tile, douts, first_row, TILE_K, TILE_Q, BLOCK_DV, V_HEAD_DIM
    )
    if place.seed is not None:
        dweights = tl.where(keep, dweights, 0.0)
    gradient = score_gradient(weights, dweights, row_delta[None, :], scales)
    sums = added_up(sums, gradient, terms, SUMMED, 1)
    gradient = gradient * slopes
    dk_tile = product(split(gradient, q_tile), q_tile, dk_tile)
    return dk_tile, dv_tile, sums


@triton.jit(do_not_specialize=NUMBERS)
def dkdv_kernel(
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
    dk,
    dv,
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
    dout_strides,
    dk_strides,
    dv_strides,
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
    """Grid: one program for each (matrix of k, tile of its rows), and slice of columns of k and of v (see `slices`).

    It visits every query head of the group in turn.

    ``sums`` are where the gradients of the terms SUMMED go, summed over rows, a number for each column of each matrix
    of q.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    index, sequence, first_column = tile_of_program(tl.program_id(0), packed, 1, sequences, k_len, TILE_K, False)
    own = sequences_of(packed, 1, sequence, sequences, q_len, k_len, most_rows, most_columns, TO_THE_END)
    scales = scales_of(
        q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, index, scale, score_scale,
        1.0 if seed is None else kept_scale, steepest,
    )  # fmt: skip
    keys = matrix(k, index, kv_sizes, k_strides, own.k, distances[1], UNITS[1])
    values = matrix(v, index, kv_sizes, v_strides, own.k, distances[2], UNITS[2])
    k_tile = load_slice(keys, first_column, 0, TILE_K, BLOCK_D, HEAD_DIM, True)
    v_tile = load_slice(values, first_column, 0, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
    dk_tile = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    q_rows = length_for(packed, first_column, own.k, own.rows)
    ranges = query_ranges(
        first_column, q_rows, left + own.shift, right + own.shift, TILE_K, TILE_Q, LEFT, RIGHT
    )  # fmt: skip
    # A loop more, for the other edge of a window, costs more in registers than masking costs in time.
    MASK_ALL: tl.constexpr = LEFT or MASK is not None or packed is not None
    if MASK_ALL:
        ranges = ((ranges[0][0], ranges[2][1]),)
    else:
        ranges = (ranges[0], ranges[1])
    columns = first_column + tl.arange(0, TILE_K)
    for member in range(group):
        q_index = index * group + member
        place = Place(
            q_index // heads + sequence, q_index % heads, q_index + sequence * heads, own.rows, own.columns,
            left + own.shift, right + own.shift, captured, seed, threshold,
        )  # fmt: skip
        queries = matrix(q, q_index, q_sizes, q_strides, own.q, distances[0], UNITS[0])
        douts = matrix(dout, q_index, q_sizes, dout_strides, own.q, distances[3], UNITS[3])
        row_offset = tl.cast(q_index, tl.int64) * q_len + own.q.first
        row_lse = lse + row_offset
        row_delta = delta + row_offset
        column_sums = zeros_for(TILE_K, SUMMED)
        entry = None
        visited = ranges
        if blocks is not None:
            entry = block_list(blocks, place, first_column)
            visited = block_ranges(entry, TILE_Q)
            if q_statistics is not None:  # two parts of each operand leave no registers for a second loop
                visited = ((visited[0][0], visited[1][1]),)
        for part in tl.static_range(0 if RIGHT or MASK_ALL else 1, len(visited)):
            for position in range(visited[part][0], visited[part][1], TILE_Q if blocks is None else 1):
                first_row = position if blocks is None else tile_of(entry, position, TILE_Q)
                dk_tile, dv_tile, column_sums = dkdv_step(
                    dk_tile, dv_tile, column_sums, k_tile, keys, v_tile, values, queries, douts, row_lse, row_delta,
                    first_row, first_column, place, scales, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K,
                    LEFT, RIGHT, part != 1, MASK, SCORE, SUMMED, SHIFT,
                )  # fmt: skip
        for number in tl.static_range(len(SUMMED)):
            target = sums[number] + tl.cast(q_index, tl.int64) * k_len + own.k.first + columns
            tl.store(target, column_sums[number] * scales.step, mask=columns < own.k.length)
    dk_target = matrix(dk, index, kv_sizes, dk_strides, own.k, (), UNITS[4])
    dv_target = matrix(dv, index, kv_sizes, dv_strides, own.k, (), UNITS[5])
    store_slice(dk_target, dk_tile * scales.dk, first_column, tl.program_id(1) * BLOCK_D, TILE_K, BLOCK_D, HEAD_DIM)
    store_slice(dv_target, dv_tile * scales.dv, first_column, tl.program_id(1) * BLOCK_DV, TILE_K, BLOCK_DV, V_HEAD_DIM)
