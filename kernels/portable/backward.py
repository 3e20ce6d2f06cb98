"""FlashAttention-2 backward (Dao, 2023) without atomics: one pass gathers dQ, another dK and dV, both deterministic.

Both passes recompute the probabilities from q, k and the saved log-sum-exp. Two more products than the single pass with
atomic additions, and in exchange the same bits on every run, and no float32 buffer for dQ.
"""

import triton
import triton.language as tl

from .addresses import matrix, store_tile
from .masks import key_range, query_range, visible
from .operands import joined, load_operand, product, split, transposed
from .softmax import weights_again
from .units import TOP, scales_of, unit_of


@triton.jit
def score_gradient(weights, products, delta, scales):
    """d loss / d score in its unit: weight * (dp - delta), where delta is each row's sum of weight * dp."""
    return weights * (products * scales.dp - delta * scales.delta)


@triton.jit
def dq_step(
    dq_tile,
    q_tile,
    dout_tile,
    lse,
    delta,
    keys,
    values,
    first_row,
    first_column,
    diagonal,
    scales,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add what one tile of keys contributes to dQ."""
    k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, MASKED)
    v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, MASKED)
    weights = weights_again(product(q_tile, transposed(k_tile), None), scales.score, lse[:, None], SHIFT)
    if MASKED:
        rows = first_row + tl.arange(0, TILE_Q)
        columns = first_column + tl.arange(0, TILE_K)
        weights = tl.where(visible(rows[:, None], columns[None, :], keys.rows, diagonal, CAUSAL), weights, 0.0)
    gradient = score_gradient(weights, product(dout_tile, transposed(v_tile), None), delta[:, None], scales)
    return product(split(gradient, k_tile), k_tile, dq_tile)


@triton.jit(do_not_specialize=["q_len", "k_len", "diagonal"])
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
    q_len,
    k_len,
    diagonal,
    scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of q, tile of its rows). Also writes delta, which `dkdv_kernel` reads.

    delta is rowsum(dout * out) - dlse: a gradient of the log-sum-exp reaches every score in proportion to its weight.
    ``score_scale`` is ``scale`` * log2(e); ``distances`` lead from q, k, v and dout to their further parts.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    tiles = tl.cdiv(q_len, TILE_Q)
    index = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    first_row = tile * TILE_Q
    kv_index = index // group
    scales = scales_of(
        q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, kv_index, scale, score_scale
    )
    keys = matrix(k, kv_index, kv_sizes, k_strides, k_len, distances[1], UNITS[1])
    values = matrix(v, kv_index, kv_sizes, v_strides, k_len, distances[2], UNITS[2])
    queries = matrix(q, index, q_sizes, q_strides, q_len, distances[0], UNITS[0])
    douts = matrix(dout, index, q_sizes, dout_strides, q_len, distances[3], UNITS[4])
    outs = matrix(out, index, q_sizes, out_strides, q_len, (), UNITS[3])
    dout_tile = load_operand(douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    out_tile = load_operand(outs, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_delta = tl.sum(joined(out_tile) * joined(dout_tile), 1) * unit_of(dout_statistics, kv_index)
    rows = first_row + tl.arange(0, TILE_Q)
    row_offsets = tl.cast(index, tl.int64) * q_len + rows
    if dlse is not None:
        row_delta -= tl.load(dlse + row_offsets, mask=rows < q_len, other=0.0)
    tl.store(delta + row_offsets, row_delta, mask=rows < q_len)
    row_lse = tl.load(lse + row_offsets, mask=rows < q_len, other=float("inf"))
    q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dq_tile = tl.zeros([TILE_Q, BLOCK_D], tl.float32)
    whole, edge, end = key_range(first_row, k_len, diagonal, TILE_Q, TILE_K, CAUSAL)
    for first_column in range(0, whole, TILE_K):
        dq_tile = dq_step(
            dq_tile, q_tile, dout_tile, row_lse, row_delta, keys, values, first_row, first_column, diagonal, scales,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, False, SHIFT,
        )  # fmt: skip
    for first_column in range(edge, end, TILE_K):
        dq_tile = dq_step(
            dq_tile, q_tile, dout_tile, row_lse, row_delta, keys, values, first_row, first_column, diagonal, scales,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, True, SHIFT,
        )  # fmt: skip
    target = matrix(dq, index, q_sizes, dq_strides, q_len, (), UNITS[5])
    store_tile(target, dq_tile * scales.dq, first_row, TILE_Q, BLOCK_D, HEAD_DIM)


@triton.jit
def dkdv_step(
    dk_tile,
    dv_tile,
    k_tile,
    v_tile,
    queries,
    douts,
    lse,
    delta,
    first_row,
    first_column,
    k_len,
    diagonal,
    scales,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Add what one tile of query rows contributes to dK and dV. Scores are transposed: keys down, queries across.

    Rows past the end read a log-sum-exp of +inf, which makes their weights 0, so only the causal edge needs a mask.
    """
    rows = first_row + tl.arange(0, TILE_Q)
    q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
    dout_tile = load_operand(douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
    row_lse = tl.load(lse + rows, mask=rows < queries.rows, other=float("inf"))
    row_delta = tl.load(delta + rows, mask=rows < queries.rows, other=0.0)
    weights = weights_again(product(k_tile, transposed(q_tile), None), scales.score, row_lse[None, :], SHIFT)
    if MASKED:
        columns = first_column + tl.arange(0, TILE_K)
        weights = tl.where(visible(rows[None, :], columns[:, None], k_len, diagonal, CAUSAL), weights, 0.0)
    dv_tile = product(split(weights, dout_tile), dout_tile, dv_tile)
    gradient = score_gradient(weights, product(v_tile, transposed(dout_tile), None), row_delta[None, :], scales)
    dk_tile = product(split(gradient, q_tile), q_tile, dk_tile)
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["q_len", "k_len", "diagonal"])
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
    q_len,
    k_len,
    diagonal,
    scale,
    score_scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of k, tile of its rows); it visits every query head of the group in turn."""
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    tiles = tl.cdiv(k_len, TILE_K)
    index = tl.program_id(0) // tiles
    first_column = tl.program_id(0) % tiles * TILE_K
    scales = scales_of(q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, index, scale, score_scale)
    keys = matrix(k, index, kv_sizes, k_strides, k_len, distances[1], UNITS[1])
    values = matrix(v, index, kv_sizes, v_strides, k_len, distances[2], UNITS[2])
    k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, True)
    v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
    dk_tile = tl.zeros([TILE_K, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([TILE_K, BLOCK_DV], tl.float32)
    start, whole = query_range(first_column, q_len, diagonal, TILE_K, TILE_Q, CAUSAL)
    for member in range(group):
        q_index = index * group + member
        queries = matrix(q, q_index, q_sizes, q_strides, q_len, distances[0], UNITS[0])
        douts = matrix(dout, q_index, q_sizes, dout_strides, q_len, distances[3], UNITS[3])
        row_lse = lse + tl.cast(q_index, tl.int64) * q_len
        row_delta = delta + tl.cast(q_index, tl.int64) * q_len
        for first_row in range(start, whole, TILE_Q):
            dk_tile, dv_tile = dkdv_step(
                dk_tile, dv_tile, k_tile, v_tile, queries, douts, row_lse, row_delta, first_row, first_column,
                k_len, diagonal, scales,
                HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, True, SHIFT,
            )  # fmt: skip
        for first_row in range(whole, q_len, TILE_Q):
            dk_tile, dv_tile = dkdv_step(
                dk_tile, dv_tile, k_tile, v_tile, queries, douts, row_lse, row_delta, first_row, first_column,
                k_len, diagonal, scales,
                HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, False, SHIFT,
            )  # fmt: skip
    dk_target = matrix(dk, index, kv_sizes, dk_strides, k_len, (), UNITS[4])
    dv_target = matrix(dv, index, kv_sizes, dv_strides, k_len, (), UNITS[5])
    store_tile(dk_target, dk_tile * scales.dk, first_column, TILE_K, BLOCK_D, HEAD_DIM)
    store_tile(dv_target, dv_tile * scales.dv, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM)
