"""FlashAttention-2 forward (Dao, 2023): one program per tile of query rows walks over the keys it can see."""

import triton
import triton.language as tl

from .addresses import matrix
from .masks import block_list, block_ranges, key_ranges, tile_of
from .operands import negated, product, split
from .pairs import Place, existing, kept_pairs, seen_pairs
from .sequences import NUMBERS, length_for, sequences_of, tile_of_program
from .slices import load_slice, products_of_rows, store_slice
from .softmax import LOG2_E, softmax_finish, softmax_start, softmax_step
from .units import LOW, TOP, unit_of

SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def products_of(
    q_tile,
    queries,
    first_row,
    keys,
    first_column,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Scores of a tile of keys before their scale and mask. FLIP negates them, unless q's tile is negated already."""
    k_tile = load_slice(keys, first_column, 0, TILE_K, BLOCK_D, HEAD_DIM, CHECK_ROWS)
    products = products_of_rows(
        q_tile, queries, first_row, k_tile, keys, first_column, TILE_Q, TILE_K, BLOCK_D, HEAD_DIM
    )
    if FLIP and HEAD_DIM > BLOCK_D:
        products = -products
    return products


@triton.jit
def forward_step(
    state,
    accumulator,
    ahead,
    q_tile,
    queries,
    keys,
    values,
    first_row,
    first_column,
    place,
    scale,
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
    FLIP: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Fold one tile of keys and values into the running softmax and output.

    ``ahead`` holds the products of this tile if they are computed a step ahead, and is () otherwise. Those of the next
    tile depend on nothing here, so the tensor cores work on them while this tile's exponentials are computed.
    """
    if len(ahead) == 1:
        products = ahead[0]
        following = first_column + TILE_K
        ahead = (
            products_of(q_tile, queries, first_row, keys, following, HEAD_DIM, BLOCK_D, TILE_Q, TILE_K, MASKED, FLIP),
        )
    else:
        products = products_of(
            q_tile, queries, first_row, keys, first_column, HEAD_DIM, BLOCK_D, TILE_Q, TILE_K, MASKED, FLIP
        )
    rows = first_row + tl.arange(0, TILE_Q)[:, None]
    columns = first_column + tl.arange(0, TILE_K)[None, :]
    exists = existing(rows, columns, place, MASKED)
    if SCORE is not None:
        products = SCORE(products * scale, place.batch, place.head, rows, columns, exists, place.captured[1])
        scale = LOG2_E
    if MASKED:
        seen = seen_pairs(rows, columns, exists, place, LEFT, RIGHT, MASK)
        products = tl.where(seen, products, float("-inf"))
    state, weights, rescale = softmax_step(state, products, scale, SHIFT, len(q_tile) == 1)
    if place.seed is not None:
        weights = tl.where(kept_pairs(first_row, first_column, place, TILE_Q, TILE_K, False), weights, 0.0)
    own_columns = tl.program_id(1) * BLOCK_DV
    v_tile = load_slice(values, first_column, own_columns, TILE_K, BLOCK_DV, V_HEAD_DIM, MASKED)
    accumulator = product(split(weights, v_tile), v_tile, accumulator * rescale[:, None])
    return state, accumulator, ahead


@triton.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q,
    k,
    v,
    q_statistics,
    k_statistics,
    v_statistics,
    out,
    lse,
    sinks,
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
    kept_scale,
    threshold,
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
    TO_THE_END: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Grid: one program for each (matrix of q, tile of its rows), and slice of v's columns (see `slices`).

    ``scale`` is |scale|, times log2(e) without score rules; FLIP negates q. ``distances`` lead from q, k and v to their
    further parts. ``sinks`` holds a logit for each head; see `pairs` for ``captured``, ``seed`` and ``threshold``, and
    `masks` for ``blocks``.
    """
    index, sequence, first_row = tile_of_program(tl.program_id(0), packed, 0, sequences, q_len, TILE_Q, RIGHT)
    own = sequences_of(packed, 0, sequence, sequences, q_len, k_len, most_rows, most_columns, TO_THE_END)
    kv_index = index // group
    place = Place(
        index // heads + sequence, index % heads, index + sequence * heads, own.rows, own.columns,
        left + own.shift, right + own.shift, captured, seed, threshold,
    )  # fmt: skip
    keys = matrix(k, kv_index, kv_sizes, k_strides, own.k, distances[1], UNITS[1])
    values = matrix(v, kv_index, kv_sizes, v_strides, own.k, distances[2], UNITS[2])
    queries = matrix(q, index, q_sizes, q_strides, own.q, distances[0], UNITS[0])
    q_tile = load_slice(queries, first_row, 0, TILE_Q, BLOCK_D, HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    scale *= unit_of(q_statistics, kv_index) * unit_of(k_statistics, kv_index)
    if SCORE is None:
        # A zero scale makes all scores equal; the smallest normal number does too, and -inf times it stays -inf.
        scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    SHIFT: tl.constexpr = TOP if v.dtype.element_ty == tl.float16 else LOW
    state = softmax_start(TILE_Q, sinks, place.head, SHIFT)
    accumulator = tl.zeros([TILE_Q, BLOCK_DV], tl.float32)
    k_rows = length_for(packed, first_row, own.q, own.columns)
    ranges = key_ranges(first_row, k_rows, place.left, place.right, TILE_Q, TILE_K, LEFT, RIGHT)
    ahead = ()
    if AHEAD:
        ahead = (products_of(q_tile, queries, first_row, keys, 0, HEAD_DIM, BLOCK_D, TILE_Q, TILE_K, True, FLIP),)
        # The tile that comes after the last whole one may not fill its rows: the last loop can look ahead to it.
        whole = tl.maximum(ranges[1][1] - TILE_K, 0)
        ranges = (ranges[0], (ranges[1][0], whole), (tl.maximum(ranges[2][0] - TILE_K, 0), ranges[2][1]))
    entry = None
    if blocks is not None:
        entry = block_list(blocks, place, first_row)
        ranges = block_ranges(entry, TILE_K)
    elif MASK is not None:
        ranges = ((ranges[0][0], ranges[2][1]),)
    for part in tl.static_range(0 if LEFT or MASK is not None else 1, len(ranges)):
        for position in range(ranges[part][0], ranges[part][1], TILE_K if blocks is None else 1):
            first_column = position if blocks is None else tile_of(entry, position, TILE_K)
            state, accumulator, ahead = forward_step(
                state, accumulator, ahead, q_tile, queries, keys, values, first_row, first_column, place, scale,
                HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, LEFT, RIGHT, part != 1, MASK, SCORE,
                FLIP, SHIFT,
            )  # fmt: skip
    normaliser, row_lse = softmax_finish(state, SHIFT)
    normaliser *= unit_of(v_statistics, kv_index) * kept_scale
    target = matrix(out, index, q_sizes, out_strides, own.q, (), UNITS[3])
    own_columns = tl.program_id(1) * BLOCK_DV
    store_slice(target, accumulator * normaliser[:, None], first_row, own_columns, TILE_Q, BLOCK_DV, V_HEAD_DIM)
    rows = first_row + tl.arange(0, TILE_Q)
    tl.store(lse + tl.cast(index, tl.int64) * q_len + own.q.first + rows, row_lse, mask=rows < own.q.length)
