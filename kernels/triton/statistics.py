"""Statistics of the rows of scores: the log-sum-exp, the largest score, and the entropy of the softmax.

The forward without values: each program takes a tile of query rows and loops over the keys they can see. With m a row's
running maximum of scores in base 2, its sink among them, it keeps L = sum exp2(s - m) and W = sum exp2(s - m) (m - s).
The entropy is (log2 L + W / L) ln 2. L is at least 1 and W at least 0, so nothing cancels, however large scores are.
"""

import triton
import triton.language as tl

from ..lib.softmax import LOG2_E
from .forward import raw_scores, visible_scores
from .lib.masks import block_list, block_ranges, key_ranges, tile_of
from .lib.matmul import load, negated
from .lib.matrix import matrix
from .lib.pairs import HeadInfo
from .lib.pow2 import pow2_scale
from .lib.softmax import LN_2, SMALLEST, softmax_finish, softmax_start, softmax_step
from .lib.varlen import UNSPECIALIZED, length_to_visit, program_tile, sequences_of

FAR: tl.constexpr = tl.constexpr(2.0**64)
"""Replaces larger distances to the maximum, whose exponentials are 0: 0 times infinity would be NaN."""


@triton.jit
def statistics_step(
    state, weighted, q_tile, queries, keys, first_row, first_column, head, scale, scale_log2,
    MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, FLIP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax and to W (``weighted``)."""
    s = raw_scores(q_tile, queries, first_row, keys, first_column, MASKED, FLIP, C)
    s = visible_scores(s, scale, first_row, first_column, head, MASKED, MASK, SCORE, C)
    before = state
    state, p, rescale = softmax_step(before, s, scale_log2, 0, False)
    pivot = tl.where(state.maximum == float("-inf"), 0.0, state.maximum)
    growth = tl.minimum(pivot - before.maximum, FAR)
    below = tl.minimum(pivot[:, None] - s * scale_log2, FAR)
    weighted = (weighted + before.total * growth) * rescale + tl.sum(p * below, 1)
    return state, weighted


@triton.jit(do_not_specialize=UNSPECIALIZED)
def statistics_kernel(
    q, k, q_stats, k_stats, lse, max_scores, entropy, sinks, captured, blocks, cu_seqlens,
    q_sizes, kv_sizes, q_strides, k_strides, lo_offsets,
    group, heads, q_len, k_len, left, right, num_seqs, max_seqlen_q, max_seqlen_k, scale,
    C: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STRIDE_MULTIPLES: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Grid: (batch-heads * tiles of query rows, 1). Arguments as `forward.forward_kernel` has; ``scale`` is |scale|."""
    batch_head, sequence, first_row = program_tile(
        tl.program_id(0), cu_seqlens, 0, num_seqs, q_len, C.TILE_Q, C.RIGHT
    )  # fmt: skip
    seq = sequences_of(cu_seqlens, 0, sequence, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
    kv_head = batch_head // group
    head = HeadInfo(
        batch_head // heads + sequence, batch_head % heads, batch_head + sequence * heads, seq.q_len, seq.k_len,
        left + seq.shift, right + seq.shift, captured, None, 0,
    )  # fmt: skip
    keys = matrix(k, kv_head, kv_sizes, k_strides, seq.k, lo_offsets[1], STRIDE_MULTIPLES[1])
    queries = matrix(q, batch_head, q_sizes, q_strides, seq.q, lo_offsets[0], STRIDE_MULTIPLES[0])
    q_tile = load(queries, first_row, 0, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    scale *= pow2_scale(q_stats, kv_head) * pow2_scale(k_stats, kv_head)
    to_scores = 1.0
    scale_log2 = LOG2_E
    if SCORE is None:
        to_scores = tl.where(scale > SMALLEST, scale, SMALLEST)
        scale_log2 = to_scores * LOG2_E
    state = softmax_start(C.TILE_Q, sinks, head.head, 0)
    weighted = tl.zeros([C.TILE_Q], tl.float32)
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
            state, weighted = statistics_step(
                state, weighted, q_tile, queries, keys, first_row, first_column, head, scale, scale_log2,
                part != 1, MASK, SCORE, FLIP, C,
            )  # fmt: skip
    normaliser, row_lse = softmax_finish(state, 0)
    total = tl.where(state.total == 0.0, 1.0, state.total)
    row_entropy = (tl.log2(total) + weighted * normaliser) * LN_2
    # The logarithm may be rounded below 0. Not a maximum, which may drop a NaN.
    row_entropy = tl.where(row_entropy < 0.0, 0.0, row_entropy)
    # Maxima have dropped what was NaN, but totals have not. Those of a score of +inf are NaN too.
    largest = state.raw_maximum * to_scores
    largest = tl.where((total != total) & (largest != float("inf")), total, largest)
    rows = first_row + tl.arange(0, C.TILE_Q)
    offsets = tl.cast(batch_head, tl.int64) * q_len + seq.q.first + rows
    exists = rows < seq.q.length
    tl.store(lse + offsets, row_lse, mask=exists)
    tl.store(max_scores + offsets, largest, mask=exists)
    tl.store(entropy + offsets, row_entropy, mask=exists)
