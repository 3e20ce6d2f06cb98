"""FlashAttention-2 backward (Dao, 2023) without atomics: one pass gathers dQ, another dK and dV, both deterministic.

Both passes recompute the probabilities from q, k and the saved log-sum-exp. Two more products than the single pass with
atomic additions, and in exchange the same bits on every run, and no float32 buffer for dQ. Each pass also sums up what
it sees of the gradients of tensors that score rules captured; those with an element for each pair have a pass of their
own.
"""

import triton
import triton.language as tl

from .addresses import matrix, store_tile
from .masks import block_list, block_ranges, key_ranges, query_ranges, tile_of
from .operands import joined, load_operand, product, split, transposed
from .pairs import Place, existing, kept_pairs, seen_pairs
from .softmax import LOG2_E, weights_again
from .units import TOP, scales_of, unit_of


@triton.jit
def score_gradient(weights, products, delta, scales):
    """d loss / d score in its unit: weight * (dp - delta), where delta is each row's sum of weight * dp."""
    return weights * (products * scales.dp - delta * scales.delta)


@triton.jit
def weights_and_slopes(
    products, rows, columns, lse, scales, place,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
    SHIFT: tl.constexpr, CHECK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's weights, d score / d product of q and k (but for the scale), and d score / d what rules captured."""
    exists = existing(rows, columns, place, CHECK_COLUMNS)
    slopes = 1.0
    terms = ()
    if SCORE is not None:
        scores, slopes, terms = SCORE(
            products * scales.natural, place.batch, place.head, rows, columns, exists, place.captured[1]
        )
        weights = weights_again(scores, LOG2_E, lse, SHIFT)
    else:
        weights = weights_again(products, scales.score, lse, SHIFT)
    if MASKED:
        weights = tl.where(seen_pairs(rows, columns, exists, place, LEFT, RIGHT, MASK), weights, 0.0)
    return weights, slopes, terms


@triton.jit
def added_up(sums, gradient, terms, CHOSEN: tl.constexpr, AXIS: tl.constexpr):
    """``sums`` and what a tile of score gradients adds to them, summed over one axis, for the terms CHOSEN."""
    added = ()
    for number in tl.static_range(len(CHOSEN)):
        added = added + (sums[number] + tl.sum(gradient * terms[CHOSEN[number]], AXIS),)  # noqa: RUF005 Triton has no *
    return added


@triton.jit
def zeros_for(SIZE: tl.constexpr, CHOSEN: tl.constexpr):
    """Nothing summed up yet."""
    sums = ()
    for _ in tl.static_range(len(CHOSEN)):
        sums = sums + (tl.zeros([SIZE], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def row_lse_of(lse, rows, q_len, SCORE: tl.constexpr):
    """Each row's log-sum-exp; +inf, which leaves no weight, for rows past the end.

    And for rows that see nothing where rules may have made every score -inf: masks hide them anyhow.
    """
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=float("inf"))
    if SCORE is not None:
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    return row_lse


@triton.jit
def dq_step(
    dq_tile,
    sums,
    q_tile,
    dout_tile,
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
    k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, MASKED)
    v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, MASKED)
    rows = first_row + tl.arange(0, TILE_Q)[:, None]
    columns = first_column + tl.arange(0, TILE_K)[None, :]
    weights, slopes, terms = weights_and_slopes(
        product(q_tile, transposed(k_tile), None), rows, columns, lse[:, None], scales, place,
        LEFT, RIGHT, MASKED, MASK, SCORE, SHIFT, MASKED,
    )  # fmt: skip
    dweights = product(dout_tile, transposed(v_tile), None)
    if place.seed is not None:
        dweights = tl.where(kept_pairs(rows, columns, place), dweights, 0.0)
    gradient = score_gradient(weights, dweights, delta[:, None], scales)
    sums = added_up(sums, gradient, terms, SUMMED, 1)
    gradient = gradient * slopes
    return product(split(gradient, k_tile), k_tile, dq_tile), sums


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "threshold"])
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
    delta,
    dq,
    sums,
    seed,
    captured,
    blocks,
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
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of q, tile of its rows). Also writes delta, which the other passes read.

    delta is rowsum(dout * out) - dlse: a gradient of the log-sum-exp reaches every score in proportion to its weight.
    ``score_scale`` is ``scale`` * log2(e); ``distances`` lead from q, k, v and dout to their further parts. ``sums``
    are where the gradients of the terms SUMMED go, summed over columns, a number for each row; see `pairs` for the
    rest.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    tiles = tl.cdiv(q_len, TILE_Q)
    index = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if RIGHT:
        tile = tiles - 1 - tile
    first_row = tile * TILE_Q
    kv_index = index // group
    place = Place(index // heads, index % heads, index, q_len, k_len, left, right, captured, seed, threshold)
    scales = scales_of(
        q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, kv_index, scale, score_scale,
        1.0 if seed is None else kept_scale, steepest,
    )  # fmt: skip
    keys = matrix(k, kv_index, kv_sizes, k_strides, k_len, distances[1], UNITS[1])
    values = matrix(v, kv_index, kv_sizes, v_strides, k_len, distances[2], UNITS[2])
    queries = matrix(q, index, q_sizes, q_strides, q_len, distances[0], UNITS[0])
    douts = matrix(dout, index, q_sizes, dout_strides, q_len, distances[3], UNITS[4])
    outs = matrix(out, index, q_sizes, out_strides, q_len, (), UNITS[3])
    dout_tile = load_operand(douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    out_tile = load_operand(outs, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_delta = tl.sum(joined(out_tile) * joined(dout_tile), 1) * unit_of(dout_statistics, kv_index)
    rows = first_row + tl.arange(0, TILE_Q)
    row_offsets = tl.cast(index, tl.int64) * q_len
    if dlse is not None:
        row_delta -= tl.load(dlse + row_offsets + rows, mask=rows < q_len, other=0.0)
    tl.store(delta + row_offsets + rows, row_delta, mask=rows < q_len)
    row_lse = row_lse_of(lse + row_offsets, rows, q_len, SCORE)
    q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dq_tile = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    row_sums = zeros_for(TILE_Q, SUMMED)
    ranges = key_ranges(first_row, k_len, left, right, TILE_Q, TILE_K, LEFT, RIGHT)
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
                dq_tile, row_sums, q_tile, dout_tile, row_lse, row_delta, keys, values, first_row, first_column, place,
                scales, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, LEFT, RIGHT, part != 1, MASK, SCORE,
                SUMMED, SHIFT,
            )  # fmt: skip
    target = matrix(dq, index, q_sizes, dq_strides, q_len, (), UNITS[5])
    store_tile(target, dq_tile * scales.dq, first_row, TILE_Q, BLOCK_D, HEAD_DIM)
    for number in tl.static_range(len(SUMMED)):
        tl.store(sums[number] + row_offsets + rows, row_sums[number] * scales.step, mask=rows < q_len)


@triton.jit
def dkdv_step(
    dk_tile,
    dv_tile,
    sums,
    k_tile,
    v_tile,
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
    q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dout_tile = load_operand(douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_lse = row_lse_of(lse, across, queries.rows, SCORE)
    row_delta = tl.load(delta + across, mask=across < queries.rows, other=0.0)
    rows = across[None, :]
    columns = first_column + tl.arange(0, TILE_K)[:, None]
    weights, slopes, terms = weights_and_slopes(
        product(k_tile, transposed(q_tile), None), rows, columns, row_lse[None, :], scales, place,
        LEFT, RIGHT, MASKED, MASK, SCORE, SHIFT, True,
    )  # fmt: skip
    kept = weights
    if place.seed is not None:
        keep = kept_pairs(rows, columns, place)
        kept = tl.where(keep, weights, 0.0)
    dv_tile = product(split(kept, dout_tile), dout_tile, dv_tile)
    dweights = product(v_tile, transposed(dout_tile), None)
    if place.seed is not None:
        dweights = tl.where(keep, dweights, 0.0)
    gradient = score_gradient(weights, dweights, row_delta[None, :], scales)
    sums = added_up(sums, gradient, terms, SUMMED, 1)
    gradient = gradient * slopes
    dk_tile = product(split(gradient, q_tile), q_tile, dk_tile)
    return dk_tile, dv_tile, sums


@triton.jit(do_not_specialize=["q_len", "k_len", "left", "right", "heads", "threshold"])
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
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of k, tile of its rows); it visits every query head of the group in turn.

    ``sums`` are where the gradients of the terms SUMMED go, summed over rows, a number for each column of each matrix
    of q.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    tiles = tl.cdiv(k_len, TILE_K)
    index = tl.program_id(0) // tiles
    first_column = tl.program_id(0) % tiles * TILE_K
    scales = scales_of(
        q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, index, scale, score_scale,
        1.0 if seed is None else kept_scale, steepest,
    )  # fmt: skip
    keys = matrix(k, index, kv_sizes, k_strides, k_len, distances[1], UNITS[1])
    values = matrix(v, index, kv_sizes, v_strides, k_len, distances[2], UNITS[2])
    k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, True)
    v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
    dk_tile = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    ranges = query_ranges(first_column, q_len, left, right, TILE_K, TILE_Q, LEFT, RIGHT)
    # A loop more, for the other edge of a window, costs more in registers than masking costs in time.
    MASK_ALL: tl.constexpr = LEFT or MASK is not None
    if MASK_ALL:
        ranges = ((ranges[0][0], ranges[2][1]),)
    columns = first_column + tl.arange(0, TILE_K)
    for member in range(group):
        q_index = index * group + member
        place = Place(
            q_index // heads, q_index % heads, q_index, q_len, k_len, left, right, captured, seed, threshold
        )  # fmt: skip
        queries = matrix(q, q_index, q_sizes, q_strides, q_len, distances[0], UNITS[0])
        douts = matrix(dout, q_index, q_sizes, dout_strides, q_len, distances[3], UNITS[3])
        row_lse = lse + tl.cast(q_index, tl.int64) * q_len
        row_delta = delta + tl.cast(q_index, tl.int64) * q_len
        column_sums = zeros_for(TILE_K, SUMMED)
        entry = None
        visited = ranges
        if blocks is not None:
            entry = block_list(blocks, place, first_column)
            visited = block_ranges(entry, TILE_Q)
        for part in tl.static_range(0 if RIGHT or MASK_ALL else 1, 2 if blocks is not None or not MASK_ALL else 1):
            for position in range(visited[part][0], visited[part][1], TILE_Q if blocks is None else 1):
                first_row = position if blocks is None else tile_of(entry, position, TILE_Q)
                dk_tile, dv_tile, column_sums = dkdv_step(
                    dk_tile, dv_tile, column_sums, k_tile, v_tile, queries, douts, row_lse, row_delta, first_row,
                    first_column, place, scales, HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, LEFT, RIGHT,
                    part != 1, MASK, SCORE, SUMMED, SHIFT,
                )  # fmt: skip
        for number in tl.static_range(len(SUMMED)):
            target = sums[number] + tl.cast(q_index, tl.int64) * k_len + columns
            tl.store(target, column_sums[number] * scales.step, mask=columns < k_len)
    dk_target = matrix(dk, index, kv_sizes, dk_strides, k_len, (), UNITS[4])
    dv_target = matrix(dv, index, kv_sizes, dv_strides, k_len, (), UNITS[5])
    store_tile(dk_target, dk_tile * scales.dk, first_column, TILE_K, BLOCK_D, HEAD_DIM)
    store_tile(dv_target, dv_tile * scales.dv, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM)
