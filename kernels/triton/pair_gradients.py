"""The gradient of a captured tensor with an element for each pair, such as a bias, or for each distance.

A program computes one tile of it: the sum of dS tiles over the batch entries and heads that share the tensor. Nothing
is added atomically, and nothing quadratic is stored but the result.

For distances (column - row) a program computes one diagonal of square tiles, a band, where an element has the same
distance in all tiles: it sums the tiles, then their diagonals. `mod_gradients` adds what neighbouring bands share.
"""

import triton
import triton.language as tl

from .lib.backward import chained, load_lse, of_entropies, probabilities, row_numbers, score_gradient
from .lib.matmul import dot_rows, load
from .lib.matrix import matrix
from .lib.pairs import HeadInfo, keep_mask
from .lib.pow2 import TOP, scales_of
from .lib.varlen import UNSPECIALIZED, sequences_of


@triton.jit
def pair_step(
    total, queries, keys, values, douts, lse, delta, first_row, first_column, head, scales,
    MASK: tl.constexpr, SCORE: tl.constexpr, TERM: tl.constexpr, SHIFT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add a tile of dS times the gradient term TERM."""
    across = first_row + tl.arange(0, C.TILE_Q)
    rows = across[:, None]
    columns = first_column + tl.arange(0, C.TILE_K)[None, :]
    q_tile = load(queries, first_row, 0, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    k_tile = load(keys, first_column, 0, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, True)
    s = dot_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, C.TILE_Q, C.TILE_K, C.BLOCK_D, C.HEAD_DIM
    )  # fmt: skip
    row_lse = load_lse(lse, across, queries.rows)
    row_delta = row_numbers(delta, across, queries.rows)
    p, _, terms = probabilities(
        s, rows, columns, row_lse[:, None], scales, head, True, True, MASK, SCORE, SHIFT, C
    )  # fmt: skip
    if C.V_HEAD_DIM > 0:
        dout_tile = load(douts, first_row, 0, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM, True)
        v_tile = load(values, first_column, 0, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM, True)
        dp = dot_rows(
            dout_tile, douts, first_row, v_tile, values, first_column, C.TILE_Q, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM
        )  # fmt: skip
    else:
        dp = of_entropies(p, row_numbers(douts, across, queries.rows)[:, None])
    if head.seed is not None:
        dp = tl.where(keep_mask(first_row, first_column, head, C.TILE_Q, C.TILE_K, False), dp, 0.0)
    return total + chained(score_gradient(p, dp, row_delta[:, None], scales), terms[TERM], SCORE) * scales.ds


@triton.jit
def program_coordinates(q_len, k_len, DIAGONAL: tl.constexpr, C: tl.constexpr):
    """The matrix of a program, its first row and column, and the rows that its band spans."""
    tiles_q = tl.cdiv(q_len, C.TILE_Q)
    tiles_k = tl.cdiv(k_len, C.TILE_K)
    if DIAGONAL:
        bands = tiles_q + tiles_k - 1
        target_matrix = tl.program_id(0) // bands
        ahead = tl.program_id(0) % bands - tiles_q + 1
        row_tile = tl.maximum(0, -ahead)
        column_tile = tl.maximum(0, ahead)
        reach = tl.minimum(tiles_q - row_tile, tiles_k - column_tile) * C.TILE_Q
    else:
        target_matrix = tl.program_id(0) // tiles_k // tiles_q
        row_tile = tl.program_id(0) // tiles_k % tiles_q
        column_tile = tl.program_id(0) % tiles_k
        reach = C.TILE_Q
    return target_matrix, row_tile * C.TILE_Q, column_tile * C.TILE_K, reach


@triton.jit
def tile_diagonal_sums(tile, SIZE: tl.constexpr):
    """A square tile summed along its diagonals: column - row from -SIZE to -1, and from 0 to SIZE - 1."""
    ends = tl.arange(0, SIZE)[None, :] + tl.arange(0, SIZE)[:, None]
    # Row i is rotated by i: two diagonals, SIZE apart, are then in one column.
    upright = tl.gather(tile, ends % SIZE, 1)
    wrapped = ends >= SIZE
    return tl.sum(tl.where(wrapped, upright, 0.0), 0), tl.sum(tl.where(wrapped, 0.0, upright), 0)


@triton.jit
def store_gradient(
    target, total, strides, batch, head, start_row, start_column, rows, columns, DIAGONAL: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Store a tile of the gradient, or with DIAGONAL the sums of its diagonals."""
    down = tl.arange(0, C.TILE_Q)[:, None]
    across = tl.arange(0, C.TILE_K)[None, :]
    one = tl.full((), 1, tl.int64)
    if DIAGONAL:
        before, after = tile_diagonal_sums(total, C.TILE_Q)
        start = target + tl.program_id(0) * (2 * C.TILE_Q * one) + tl.arange(0, C.TILE_Q)
        tl.store(start, before)
        tl.store(start + C.TILE_Q, after)
    else:
        start = target + batch * (strides[0] * one) + head * (strides[1] * one)
        start += start_row * (strides[2] * one) + start_column * (strides[3] * one)
        offsets = down * (strides[2] * one) + across * (strides[3] * one)
        exist = (start_row + down < rows) & (start_column + across < columns)
        tl.store(start + offsets, total.to(target.dtype.element_ty), mask=exist)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "shared_batches", "shared_heads"])
def pair_gradient_kernel(
    q, k, v, q_stats, k_stats, v_stats, dout_stats, dlse_bound, dout, lse, delta, target, seed, captured, cu_seqlens,
    q_sizes, kv_sizes, q_strides, k_strides, v_strides, dout_strides, target_strides, lo_offsets,
    group, heads, q_len, k_len, left, right, num_seqs, max_seqlen_q, max_seqlen_k,
    scale, scale_log2, keep_scale, dropout_threshold, max_slope, shared_batches, shared_heads,
    C: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TERM: tl.constexpr, DIAGONAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, STRIDE_MULTIPLES: tl.constexpr,
):  # fmt: skip
    """Grid: (matrices of the target * its tiles,). The target is (batch, heads, q_len, k_len).

    For packed sequences it is (sequences, heads, max_seqlen_q, max_seqlen_k). With DIAGONAL there is a program for each
    matrix and band, from the lower left band on; tiles are square, and the target is (batch, heads, bands, 2, TILE_Q),
    contiguous float32. ``shared_batches`` batch entries and ``shared_heads`` heads, 1 or all, share each matrix.
    """
    SHIFT: tl.constexpr = 0 if q_stats is None else TOP
    rows = q_len if cu_seqlens is None else max_seqlen_q
    columns = k_len if cu_seqlens is None else max_seqlen_k
    target_matrix, start_row, start_column, reach = program_coordinates(rows, columns, DIAGONAL, C)
    target_heads = heads // shared_heads
    first_batch = target_matrix // target_heads
    first_head = target_matrix % target_heads
    total = tl.zeros([C.TILE_Q, C.TILE_K], tl.float32)
    members = shared_batches * shared_heads
    if C.RIGHT and cu_seqlens is None:
        members = tl.where(start_column > start_row + C.TILE_Q - 1 + right, 0, members)
    if C.LEFT and cu_seqlens is None:
        members = tl.where(start_column + C.TILE_K - 1 < start_row + left, 0, members)
    for member in range(members):
        batch = first_batch + member // shared_heads
        q_head = first_head + member % shared_heads
        batch_head = q_head if cu_seqlens is not None else batch * heads + q_head
        kv_head = batch_head // group
        here = sequences_of(cu_seqlens, 0, batch, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
        head = HeadInfo(
            batch, q_head, batch * heads + q_head, here.q_len, here.k_len,
            left + here.shift, right + here.shift, captured, seed, dropout_threshold,
        )  # fmt: skip
        scales = scales_of(
            q_stats, k_stats, v_stats, dout_stats, dlse_bound, kv_head, scale, scale_log2,
            1.0 if seed is None else keep_scale, max_slope,
        )  # fmt: skip
        keys = matrix(k, kv_head, kv_sizes, k_strides, here.k, lo_offsets[1], STRIDE_MULTIPLES[1])
        values = matrix(v, kv_head, kv_sizes, v_strides, here.k, lo_offsets[2], STRIDE_MULTIPLES[2])
        queries = matrix(q, batch_head, q_sizes, q_strides, here.q, lo_offsets[0], STRIDE_MULTIPLES[0])
        row_offset = tl.cast(batch_head, tl.int64) * q_len + here.q.first
        if C.V_HEAD_DIM > 0:
            douts = matrix(dout, batch_head, q_sizes, dout_strides, here.q, lo_offsets[3], STRIDE_MULTIPLES[3])
        else:
            douts = dout + row_offset
        for along in range(0, reach, C.TILE_Q):
            total = pair_step(
                total, queries, keys, values, douts, lse + row_offset, delta + row_offset, start_row + along,
                start_column + along, head, scales, MASK, SCORE, TERM, SHIFT, C,
            )  # fmt: skip
    store_gradient(
        target, total, target_strides, first_batch, first_head, start_row, start_column, rows, columns, DIAGONAL, C
    )  # fmt: skip
