"""The gradient of a captured tensor that has an element for each pair, such as a bias.

A tile of it is what the tiles of score gradients at that place add up to, over the batch entries and heads that share
the tensor. One program gathers it, so nothing is added atomically and nothing quadratic is written but the result.
"""

import triton
import triton.language as tl

from .addresses import matrix
from .gradients import row_lse_of, score_gradient, weights_and_slopes
from .operands import load_operand, product, transposed
from .pairs import Place, kept_pairs
from .sequences import whole
from .units import TOP, scales_of


@triton.jit(
    do_not_specialize=["q_len", "k_len", "left", "right", "heads", "threshold", "shared_batches", "shared_heads"]
)
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
    UNITS: tl.constexpr,
):
    """Grid: one program for each (matrix of the target, tile of it). The target is (batch, heads, q_len, k_len).

    Each of its matrices is shared by ``shared_batches`` entries of the batch and ``shared_heads`` heads: 1, or all.
    TERM is the term whose gradient this is; see `dq` for the rest.
    """
    SHIFT: tl.constexpr = 0 if q_statistics is None else TOP
    tiles_q = tl.cdiv(q_len, TILE_Q)
    tiles_k = tl.cdiv(k_len, TILE_K)
    first_column = tl.program_id(0) % tiles_k * TILE_K
    first_row = tl.program_id(0) // tiles_k % tiles_q * TILE_Q
    own = tl.program_id(0) // tiles_k // tiles_q
    own_heads = heads // shared_heads
    first_batch = own // own_heads
    first_head = own % own_heads
    across = first_row + tl.arange(0, TILE_Q)
    rows = across[:, None]
    columns = first_column + tl.arange(0, TILE_K)[None, :]
    total = tl.zeros([TILE_Q, TILE_K], tl.float32)
    members = shared_batches * shared_heads
    if RIGHT:
        members = tl.where(first_column > first_row + TILE_Q - 1 + right, 0, members)
    if LEFT:
        members = tl.where(first_column + TILE_K - 1 < first_row + left, 0, members)
    for member in range(members):
        index = (first_batch + member // shared_heads) * heads + first_head + member % shared_heads
        kv_index = index // group
        place = Place(index // heads, index % heads, index, q_len, k_len, left, right, captured, seed, threshold)
        scales = scales_of(
            q_statistics, k_statistics, v_statistics, dout_statistics, dlse_bound, kv_index, scale, score_scale,
            1.0 if seed is None else kept_scale, steepest,
        )  # fmt: skip
        keys = matrix(k, kv_index, kv_sizes, k_strides, whole(k_len), distances[1], UNITS[1])
        values = matrix(v, kv_index, kv_sizes, v_strides, whole(k_len), distances[2], UNITS[2])
        queries = matrix(q, index, q_sizes, q_strides, whole(q_len), distances[0], UNITS[0])
        douts = matrix(dout, index, q_sizes, dout_strides, whole(q_len), distances[3], UNITS[3])
        q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
        k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, True)
        row_offset = tl.cast(index, tl.int64) * q_len
        row_lse = row_lse_of(lse + row_offset, across, q_len, SCORE)
        row_delta = tl.load(delta + row_offset + across, mask=across < q_len, other=0.0)
        weights, _, terms = weights_and_slopes(
            product(q_tile, transposed(k_tile), None), rows, columns, row_lse[:, None], scales, place,
            LEFT, RIGHT, True, MASK, SCORE, SHIFT, True,
        )  # fmt: skip
        dout_tile = load_operand(douts, first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM, True)
        v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
        dweights = product(dout_tile, transposed(v_tile), None)
        if seed is not None:
            dweights = tl.where(kept_pairs(rows, columns, place), dweights, 0.0)
        total += score_gradient(weights, dweights, row_delta[:, None], scales) * terms[TERM] * scales.step
    one = tl.full((), 1, tl.int64)
    start = target + first_batch * (target_strides[0] * one) + first_head * (target_strides[1] * one)
    start += first_row * (target_strides[2] * one) + first_column * (target_strides[3] * one)
    offsets = (across - first_row)[:, None] * (target_strides[2] * one)
    offsets += tl.arange(0, TILE_K)[None, :] * (target_strides[3] * one)
    tl.store(start + offsets, total.to(target.dtype.element_ty), mask=(rows < q_len) & (columns < k_len))
