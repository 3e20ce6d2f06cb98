"""FlashAttention-2 forward (Dao, 2023): each program takes a tile of query rows and loops over the keys they can see.

``C`` holds a kernel's compile-time sizes, see `problem.Constants`.
"""

import triton
import triton.language as tl

from ..lib.softmax import LOG2_E
from .lib.masks import block_list, block_ranges, key_ranges, tile_of
from .lib.matmul import dot, dot_rows, load, negated, split, store
from .lib.matrix import matrix
from .lib.pairs import HeadInfo, clamped, keep_mask, visible_pairs
from .lib.pow2 import LOW, TOP, pow2_scale
from .lib.softmax import SMALLEST, softmax_finish, softmax_start, softmax_step
from .lib.varlen import UNSPECIALIZED, length_to_visit, program_tile, sequences_of


@triton.jit
def raw_scores(
    q_tile, queries, first_row, keys, first_column, CHECK_ROWS: tl.constexpr, FLIP: tl.constexpr, C: tl.constexpr
):
    """q @ k.T of a tile of keys. FLIP negates it, unless q's tile is negated already."""
    k_tile = load(keys, first_column, 0, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, CHECK_ROWS)
    s = dot_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, C.TILE_Q, C.TILE_K, C.BLOCK_D, C.HEAD_DIM
    )  # fmt: skip
    if FLIP and C.HEAD_DIM > C.BLOCK_D:
        s = -s
    return s


@triton.jit
def visible_scores(
    s, scale, first_row, first_column, head, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """A tile of q @ k.T as the score rules leave ``s * scale``, or ``s`` without any; -inf where a pair is hidden."""
    rows = first_row + tl.arange(0, C.TILE_Q)[:, None]
    columns = first_column + tl.arange(0, C.TILE_K)[None, :]
    if SCORE is not None:
        row, column = clamped(rows, columns, head, MASKED)
        s = SCORE(s * scale, head.batch, head.head, row, column, head.captured[1])
    if MASKED:
        s = tl.where(visible_pairs(rows, columns, head, C.LEFT, C.RIGHT, MASK), s, float("-inf"))
    return s


@triton.jit
def forward_step(
    state, acc, ahead, q_tile, queries, keys, values, first_row, first_column, head, scale,
    MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, FLIP: tl.constexpr, SHIFT: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values to the running softmax and output.

    ``ahead`` is () or holds this tile's scores, computed one step ahead. The next tile's scores depend on nothing in
    this step, so the tensor cores compute them during this tile's exponentials.
    """
    if len(ahead) == 1:
        s = ahead[0]
        ahead = (raw_scores(q_tile, queries, first_row, keys, first_column + C.TILE_K, MASKED, FLIP, C),)
    else:
        s = raw_scores(q_tile, queries, first_row, keys, first_column, MASKED, FLIP, C)
    s = visible_scores(s, scale, first_row, first_column, head, MASKED, MASK, SCORE, C)
    if SCORE is not None:
        scale = LOG2_E
    state, p, rescale = softmax_step(state, s, scale, SHIFT, len(q_tile) == 1)
    if head.seed is not None:
        p = tl.where(keep_mask(first_row, first_column, head, C.TILE_Q, C.TILE_K, False), p, 0.0)
    v_columns = tl.program_id(1) * C.BLOCK_DV
    v_tile = load(values, first_column, v_columns, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM, MASKED)
    acc = dot(split(p, v_tile), v_tile, acc * rescale[:, None])
    return state, acc, ahead


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q, k, v, q_stats, k_stats, v_stats, out, lse, sinks, seed, captured, blocks, cu_seqlens,
    q_sizes, kv_sizes, q_strides, k_strides, v_strides, out_strides, lo_offsets,
    group, heads, q_len, k_len, left, right, num_seqs, max_seqlen_q, max_seqlen_k,
    scale, keep_scale, dropout_threshold,
    C: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STRIDE_MULTIPLES: tl.constexpr, AHEAD: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Grid: (batch-heads * tiles of query rows, slices of v's columns).

    ``scale`` is |scale|, times log2(e) without score rules; FLIP negates q. ``lo_offsets``: from the high to the low
    halves of q, k and v. ``sinks``: a logit per head. See `lib.pairs` for ``captured`` and dropout, `lib.masks` for
    ``blocks``, `lib.varlen` for ``cu_seqlens``, `lib.pow2` for the stats.
    """
    batch_head, sequence, first_row = program_tile(
        tl.program_id(0), cu_seqlens, 0, num_seqs, q_len, C.TILE_Q, C.RIGHT
    )  # fmt: skip
    seq = sequences_of(cu_seqlens, 0, sequence, num_seqs, q_len, k_len, max_seqlen_q, max_seqlen_k, BOTTOM_RIGHT)
    kv_head = batch_head // group
    head = HeadInfo(
        batch_head // heads + sequence, batch_head % heads, batch_head + sequence * heads, seq.q_len, seq.k_len,
        left + seq.shift, right + seq.shift, captured, seed, dropout_threshold,
    )  # fmt: skip
    keys = matrix(k, kv_head, kv_sizes, k_strides, seq.k, lo_offsets[1], STRIDE_MULTIPLES[1])
    values = matrix(v, kv_head, kv_sizes, v_strides, seq.k, lo_offsets[2], STRIDE_MULTIPLES[2])
    queries = matrix(q, batch_head, q_sizes, q_strides, seq.q, lo_offsets[0], STRIDE_MULTIPLES[0])
    q_tile = load(queries, first_row, 0, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    scale *= pow2_scale(q_stats, kv_head) * pow2_scale(k_stats, kv_head)
    if SCORE is None:
        scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    SHIFT: tl.constexpr = TOP if v.dtype.element_ty == tl.float16 else LOW
    state = softmax_start(C.TILE_Q, sinks, head.head, SHIFT)
    acc = tl.zeros([C.TILE_Q, C.BLOCK_DV], tl.float32)
    k_rows = length_to_visit(cu_seqlens, first_row, seq.q, seq.k_len)
    ranges = key_ranges(first_row, k_rows, head.left, head.right, C.TILE_Q, C.TILE_K, C.LEFT, C.RIGHT)
    ahead = ()
    if AHEAD:
        ahead = (raw_scores(q_tile, queries, first_row, keys, 0, True, FLIP, C),)
        # The tile after the last whole one may be short of rows: the masked loop computes its scores.
        whole = tl.maximum(ranges[1][1] - C.TILE_K, 0)
        ranges = (ranges[0], (ranges[1][0], whole), (tl.maximum(ranges[2][0] - C.TILE_K, 0), ranges[2][1]))
    entry = None
    if blocks is not None:
        entry = block_list(blocks, head, first_row)
        ranges = block_ranges(entry, C.TILE_K, cu_seqlens, first_row, seq.q_len, k_rows)
    elif MASK is not None:
        ranges = ((ranges[0][0], ranges[2][1]),)
    for part in tl.static_range(0 if C.LEFT or MASK is not None else 1, len(ranges)):
        for position in range(ranges[part][0], ranges[part][1], C.TILE_K if blocks is None else 1):
            first_column = position if blocks is None else tile_of(entry, position, C.TILE_K)
            state, acc, ahead = forward_step(
                state, acc, ahead, q_tile, queries, keys, values, first_row, first_column, head, scale,
                part != 1, MASK, SCORE, FLIP, SHIFT, C,
            )  # fmt: skip
    normaliser, row_lse = softmax_finish(state, SHIFT)
    normaliser *= pow2_scale(v_stats, kv_head) * keep_scale
    target = matrix(out, batch_head, q_sizes, out_strides, seq.q, (), STRIDE_MULTIPLES[3])
    v_columns = tl.program_id(1) * C.BLOCK_DV
    store(target, acc * normaliser[:, None], first_row, v_columns, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM)
    rows = first_row + tl.arange(0, C.TILE_Q)
    tl.store(lse + tl.cast(batch_head, tl.int64) * q_len + seq.q.first + rows, row_lse, mask=rows < seq.q.length)
