"""FlashAttention-2 backward (Dao, 2023) without atomics: one pass for dQ, one for dK and dV.

Both recompute P. That is two more products than one pass with atomic additions; in exchange results are bitwise the
same on every run, and there is no float32 buffer for dQ. ``C`` holds compile-time sizes, see `problem.Constants`.
"""

import triton
import triton.language as tl

from ..lib.softmax import lowered
from .lib.backward import (
    add_terms,
    chained,
    load_lse,
    of_entropies,
    probabilities,
    row_numbers,
    score_gradient,
    zeros_for,
)
from .lib.masks import block_list, block_ranges, key_ranges, query_ranges, tile_of
from .lib.matmul import dot, dot_rows, load, rowsum_product, split, store
from .lib.matrix import matrix
from .lib.pairs import HeadInfo, keep_mask
from .lib.pow2 import TOP, pow2_scale, scales_of
from .lib.varlen import UNSPECIALIZED, length_to_visit, program_tile, sequences_of


@triton.jit
def dq_step(
    dq_tile, sums, q_tile, queries, dout_tile, douts, lse, delta, keys, values, first_row, first_column, head, scales,
    MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TERMS: tl.constexpr, WITH_DQ: tl.constexpr,
    SHIFT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dQ, if WITH_DQ, and to the row sums of the gradient terms TERMS."""
    k_tile = load(keys, first_column, tl.program_id(1) * C.BLOCK_D, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, MASKED)
    if C.V_HEAD_DIM > 0:
        v_tile = load(values, first_column, 0, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM, MASKED)
    rows = first_row + tl.arange(0, C.TILE_Q)[:, None]
    columns = first_column + tl.arange(0, C.TILE_K)[None, :]
    s = dot_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, C.TILE_Q, C.TILE_K, C.BLOCK_D, C.HEAD_DIM
    )  # fmt: skip
    p, slope, terms = probabilities(
        s, rows, columns, lse[:, None], scales, head, MASKED, MASKED, MASK, SCORE, SHIFT, C
    )  # fmt: skip
    if C.V_HEAD_DIM > 0:
        dp = dot_rows(
            dout_tile, douts, first_row, v_tile, values, first_column, C.TILE_Q, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM
        )  # fmt: skip
    else:
        dp = of_entropies(p, dout_tile[:, None])
    if head.seed is not None:
        dp = tl.where(keep_mask(first_row, first_column, head, C.TILE_Q, C.TILE_K, False), dp, 0.0)
    ds = score_gradient(p, dp, delta[:, None], scales)
    sums = add_terms(sums, ds, terms, SCORE, TERMS)
    if WITH_DQ:
        ds = chained(ds, slope, SCORE)
        dq_tile = dot(split(ds, k_tile), k_tile, dq_tile)
    return dq_tile, sums


@triton.jit
def prepare_rows(
    outs, douts, dout_tile, dout_stats, dlse, lse, lowered_lse, delta, kv_head, batch_head, first_row, q_len, seq,
    C: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse and the `lowered` log-sum-exps of a tile's rows, which are stored too.

    A gradient of the log-sum-exp reaches each score in proportion to its p. Also returns the rows, and the offset of
    the sequence ``seq`` in tensors with a number per row.
    """
    if C.V_HEAD_DIM > 0:
        row_delta = rowsum_product(outs, dout_tile, douts, first_row, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM)
        row_delta *= pow2_scale(dout_stats, kv_head)
    else:
        row_delta = tl.zeros([C.TILE_Q], tl.float32)
    rows = first_row + tl.arange(0, C.TILE_Q)
    offset = tl.cast(batch_head, tl.int64) * q_len + seq.first
    if dlse is not None:
        row_delta -= row_numbers(dlse + offset, rows, seq.length)
    tl.store(delta + offset + rows, row_delta, mask=rows < seq.length)
    row_lse = load_lse(lse + offset, rows, seq.length)
    if C.V_HEAD_DIM > 0:
        row_lse = lowered(row_lse)
    # The other passes read it as the forward writes it: -inf for rows that see nothing.
    low = tl.where(row_lse == float("inf"), float("-inf"), row_lse)
    tl.store(lowered_lse + offset + rows, low, mask=rows < seq.length)
    return row_delta, row_lse, rows, offset


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(
    q, k, v, q_stats, k_stats, v_stats, dout_stats, dlse_bound, out, dout, dlse, lse, lowered_lse, delta, dq,
    term_sums, seed, captured, blocks, cu_seqlens,
    q_sizes, kv_sizes, q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, lo_offsets,
    group, heads, q_len, k_len, left, right, num_seqs, max_seqlen_q, max_seqlen_k,
    scale, scale_log2, keep_scale, dropout_threshold, max_slope,
    C: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TERMS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STRIDE_MULTIPLES: tl.constexpr,
):  # fmt: skip
    """Grid: (batch-heads * tiles of query rows, slices of q's columns). Runs first: it stores delta and lowered_lse.

    ``lo_offsets``: from the high to the low halves of q, k, v and dout. ``term_sums``: a number per row for each of the
    gradient terms TERMS. ``dq``: None if these sums alone are wanted. ``scale_log2``: scale * log2(e). ``dout``: if v
    has no columns, float32 gradients of the rows' entropies, see `of_entropies`. The rest is as in the forward.
    """
    SHIFT: tl.constexpr = 0 if q_stats is None else TOP
    batch_head, sequence, first_row = program_tile(
        tl.program_id(0), cu_seqlens, 0, num_seqs, q_len, C.TILE_Q, C.RIGHT
    )  # fmt: skip
    seq = sequences_of(cu_seqlens, 0, sequence, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
    kv_head = batch_head // group
    head = HeadInfo(
        batch_head // heads + sequence, batch_head % heads, batch_head + sequence * heads, seq.q_len, seq.k_len,
        left + seq.shift, right + seq.shift, captured, seed, dropout_threshold,
    )  # fmt: skip
    scales = scales_of(
        q_stats, k_stats, v_stats, dout_stats, dlse_bound, kv_head, scale, scale_log2,
        1.0 if seed is None else keep_scale, max_slope,
    )  # fmt: skip
    keys = matrix(k, kv_head, kv_sizes, k_strides, seq.k, lo_offsets[1], STRIDE_MULTIPLES[1])
    values = matrix(v, kv_head, kv_sizes, v_strides, seq.k, lo_offsets[2], STRIDE_MULTIPLES[2])
    queries = matrix(q, batch_head, q_sizes, q_strides, seq.q, lo_offsets[0], STRIDE_MULTIPLES[0])
    if C.V_HEAD_DIM > 0:
        douts = matrix(dout, batch_head, q_sizes, dout_strides, seq.q, lo_offsets[3], STRIDE_MULTIPLES[4])
        outs = matrix(out, batch_head, q_sizes, out_strides, seq.q, (), STRIDE_MULTIPLES[3])
        dout_tile = load(douts, first_row, 0, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM, True)
    else:
        douts = dout + tl.cast(batch_head, tl.int64) * q_len + seq.q.first
        outs = douts
        dout_tile = row_numbers(douts, first_row + tl.arange(0, C.TILE_Q), seq.q.length)
    row_delta, row_lse, rows, row_offset = prepare_rows(
        outs, douts, dout_tile, dout_stats, dlse, lse, lowered_lse, delta, kv_head, batch_head, first_row, q_len, seq.q,
        C,
    )  # fmt: skip
    q_tile = load(queries, first_row, 0, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    dq_tile = tl.zeros([C.TILE_Q, C.BLOCK_D], tl.float32)
    row_sums = zeros_for(C.TILE_Q, TERMS)
    k_rows = length_to_visit(cu_seqlens, first_row, seq.q, seq.k_len)
    ranges = key_ranges(first_row, k_rows, head.left, head.right, C.TILE_Q, C.TILE_K, C.LEFT, C.RIGHT)
    entry = None
    if blocks is not None:
        entry = block_list(blocks, head, first_row)
        ranges = block_ranges(entry, C.TILE_K, cu_seqlens, first_row, seq.q_len, k_rows)
    elif MASK is not None:
        ranges = ((ranges[0][0], ranges[2][1]),)
    for part in tl.static_range(0 if C.LEFT or MASK is not None else 1, len(ranges)):
        for position in range(ranges[part][0], ranges[part][1], C.TILE_K if blocks is None else 1):
            first_column = position if blocks is None else tile_of(entry, position, C.TILE_K)
            dq_tile, row_sums = dq_step(
                dq_tile, row_sums, q_tile, queries, dout_tile, douts, row_lse, row_delta, keys, values, first_row,
                first_column, head, scales, part != 1, MASK, SCORE, TERMS, dq is not None, SHIFT, C,
            )  # fmt: skip
    if dq is not None:
        target = matrix(dq, batch_head, q_sizes, dq_strides, seq.q, (), STRIDE_MULTIPLES[5])
        store(target, dq_tile * scales.dq, first_row, tl.program_id(1) * C.BLOCK_D, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM)
    for number in tl.static_range(len(TERMS)):
        tl.store(term_sums[number] + row_offset + rows, row_sums[number] * scales.ds, mask=rows < seq.q.length)


@triton.jit
def dkdv_step(
    dk_tile, dv_tile, sums, k_tile, keys, v_tile, values, queries, douts, lse, delta, first_row, first_column, head,
    scales, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TERMS: tl.constexpr,
    WITH_DKDV: tl.constexpr, SHIFT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add one tile of query rows to dK and dV, if WITH_DKDV, and to the column sums of the gradient terms TERMS.

    S is transposed, (keys, queries). Rows that do not exist have a P of 0, so only the band's edges and rules mask.
    """
    across = first_row + tl.arange(0, C.TILE_Q)
    q_tile = load(queries, first_row, tl.program_id(1) * C.BLOCK_D, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    if C.V_HEAD_DIM > 0:
        dout_tile = load(douts, first_row, tl.program_id(1) * C.BLOCK_DV, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM, True)
    row_lse = load_lse(lse, across, queries.rows)
    row_delta = row_numbers(delta, across, queries.rows)
    rows = across[None, :]
    columns = first_column + tl.arange(0, C.TILE_K)[:, None]
    s = dot_rows(
        k_tile, keys, first_column, q_tile, queries, first_row, C.TILE_K, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM
    )  # fmt: skip
    p, slope, terms = probabilities(
        s, rows, columns, row_lse[None, :], scales, head, True, MASKED, MASK, SCORE, SHIFT, C
    )  # fmt: skip
    kept = p
    if head.seed is not None:
        keep = keep_mask(first_row, first_column, head, C.TILE_Q, C.TILE_K, True)
        kept = tl.where(keep, p, 0.0)
    if WITH_DKDV and C.V_HEAD_DIM > 0:
        dv_tile = dot(split(kept, dout_tile), dout_tile, dv_tile)
    if C.V_HEAD_DIM > 0:
        dp = dot_rows(
            v_tile, values, first_column, dout_tile, douts, first_row, C.TILE_K, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM
        )  # fmt: skip
    else:
        dp = of_entropies(p, row_numbers(douts, across, queries.rows)[None, :])
    if head.seed is not None:
        dp = tl.where(keep, dp, 0.0)
    ds = score_gradient(p, dp, row_delta[None, :], scales)
    sums = add_terms(sums, ds, terms, SCORE, TERMS)
    if WITH_DKDV:
        ds = chained(ds, slope, SCORE)
        dk_tile = dot(split(ds, q_tile), q_tile, dk_tile)
    return dk_tile, dv_tile, sums


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(
    q, k, v, q_stats, k_stats, v_stats, dout_stats, dlse_bound, dout, lse, delta, dk, dv,
    term_sums, seed, captured, blocks, cu_seqlens,
    q_sizes, kv_sizes, q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, lo_offsets,
    group, heads, q_len, k_len, left, right, num_seqs, max_seqlen_q, max_seqlen_k,
    scale, scale_log2, keep_scale, dropout_threshold, max_slope,
    C: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, TERMS: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STRIDE_MULTIPLES: tl.constexpr,
):  # fmt: skip
    """Grid: (batch-heads of k * tiles of key rows, slices of k's and v's columns). Loops over the group's query heads.

    ``lse`` and ``delta`` are those that `dq_kernel` stored. ``term_sums``: a number per column of each query head.
    ``dk`` and ``dv``: None if these sums alone are wanted.
    """
    SHIFT: tl.constexpr = 0 if q_stats is None else TOP
    kv_head, sequence, first_column = program_tile(tl.program_id(0), cu_seqlens, 1, num_seqs, k_len, C.TILE_K, False)
    seq = sequences_of(cu_seqlens, 1, sequence, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
    scales = scales_of(
        q_stats, k_stats, v_stats, dout_stats, dlse_bound, kv_head, scale, scale_log2,
        1.0 if seed is None else keep_scale, max_slope,
    )  # fmt: skip
    keys = matrix(k, kv_head, kv_sizes, k_strides, seq.k, lo_offsets[1], STRIDE_MULTIPLES[1])
    values = matrix(v, kv_head, kv_sizes, v_strides, seq.k, lo_offsets[2], STRIDE_MULTIPLES[2])
    k_tile = load(keys, first_column, 0, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, True)
    v_tile = k_tile
    if C.V_HEAD_DIM > 0:
        v_tile = load(values, first_column, 0, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM, True)
    dk_tile = tl.zeros([C.TILE_K, C.BLOCK_D], tl.float32)
    dv_tile = tl.zeros([C.TILE_K, C.BLOCK_DV], tl.float32)
    q_rows = length_to_visit(cu_seqlens, first_column, seq.k, seq.q_len)
    ranges = query_ranges(
        first_column, q_rows, left + seq.shift, right + seq.shift, C.TILE_K, C.TILE_Q, C.LEFT, C.RIGHT
    )  # fmt: skip
    # A third loop, for the other edge of a window, costs more in registers than masking costs in time.
    MASK_ALL: tl.constexpr = C.LEFT or MASK is not None or cu_seqlens is not None
    if MASK_ALL:
        ranges = ((ranges[0][0], ranges[2][1]),)
    else:
        ranges = (ranges[0], ranges[1])
    columns = first_column + tl.arange(0, C.TILE_K)
    for member in range(group):
        batch_head = kv_head * group + member
        head = HeadInfo(
            batch_head // heads + sequence, batch_head % heads, batch_head + sequence * heads, seq.q_len, seq.k_len,
            left + seq.shift, right + seq.shift, captured, seed, dropout_threshold,
        )  # fmt: skip
        queries = matrix(q, batch_head, q_sizes, q_strides, seq.q, lo_offsets[0], STRIDE_MULTIPLES[0])
        if C.V_HEAD_DIM > 0:
            douts = matrix(dout, batch_head, q_sizes, dout_strides, seq.q, lo_offsets[3], STRIDE_MULTIPLES[3])
        row_offset = tl.cast(batch_head, tl.int64) * q_len + seq.q.first
        if C.V_HEAD_DIM == 0:
            douts = dout + row_offset
        row_lse = lse + row_offset
        row_delta = delta + row_offset
        column_sums = zeros_for(C.TILE_K, TERMS)
        entry = None
        visited = ranges
        if blocks is not None:
            entry = block_list(blocks, head, first_column)
            visited = block_ranges(entry, C.TILE_Q, cu_seqlens, first_column, seq.k_len, q_rows)
            # Two halves of each operand leave no registers for a second loop.
            if q_stats is not None and cu_seqlens is None:
                visited = ((visited[0][0], visited[1][1]),)
        for part in tl.static_range(0 if C.RIGHT or MASK_ALL else 1, len(visited)):
            for position in range(visited[part][0], visited[part][1], C.TILE_Q if blocks is None else 1):
                first_row = position if blocks is None else tile_of(entry, position, C.TILE_Q)
                dk_tile, dv_tile, column_sums = dkdv_step(
                    dk_tile, dv_tile, column_sums, k_tile, keys, v_tile, values, queries, douts, row_lse, row_delta,
                    first_row, first_column, head, scales, part != 1, MASK, SCORE, TERMS, dk is not None, SHIFT, C,
                )  # fmt: skip
        for number in tl.static_range(len(TERMS)):
            target = term_sums[number] + tl.cast(batch_head, tl.int64) * k_len + seq.k.first + columns
            tl.store(target, column_sums[number] * scales.ds, mask=columns < seq.k.length)
    if dk is not None:
        dk_target = matrix(dk, kv_head, kv_sizes, dk_strides, seq.k, (), STRIDE_MULTIPLES[4])
        if C.V_HEAD_DIM > 0:
            dv_target = matrix(dv, kv_head, kv_sizes, dv_strides, seq.k, (), STRIDE_MULTIPLES[5])
        d, dv_column = tl.program_id(1) * C.BLOCK_D, tl.program_id(1) * C.BLOCK_DV
        store(dk_target, dk_tile * scales.dk, first_column, d, C.TILE_K, C.BLOCK_D, C.HEAD_DIM)
        if C.V_HEAD_DIM > 0:
            store(dv_target, dv_tile * scales.dv, first_column, dv_column, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM)
