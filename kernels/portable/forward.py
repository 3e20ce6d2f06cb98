"""FlashAttention-2 forward (Dao, 2023): one program per tile of query rows walks over the keys it can see."""

import triton
import triton.language as tl

from .addresses import matrix, store_tile
from .masks import key_range, visible
from .operands import load_operand, negated, product, split, transposed
from .softmax import softmax_finish, softmax_start, softmax_step
from .units import TOP, unit_of

SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def products_of(
    q_tile,
    keys,
    first_column,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_K: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Scores of a tile of keys before their scale and mask."""
    k_tile = load_operand(keys, first_column, TILE_K, BLOCK_D, HEAD_DIM, CHECK_ROWS)
    return product(q_tile, transposed(k_tile), None)


@triton.jit
def forward_step(
    state,
    accumulator,
    ahead,
    q_tile,
    keys,
    values,
    first_row,
    first_column,
    diagonal,
    scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold one tile of keys and values into the running softmax and output.

    ``ahead`` holds the products of this tile if they are computed a step ahead, and is () otherwise. Those of the next
    tile depend on nothing here, so the tensor cores work on them while this tile's exponentials are computed.
    """
    if len(ahead) == 1:
        products = ahead[0]
        ahead = (products_of(q_tile, keys, first_column + TILE_K, HEAD_DIM, BLOCK_D, TILE_K, MASKED),)
    else:
        products = products_of(q_tile, keys, first_column, HEAD_DIM, BLOCK_D, TILE_K, MASKED)
    if MASKED:
        rows = first_row + tl.arange(0, TILE_Q)
        columns = first_column + tl.arange(0, TILE_K)
        seen = visible(rows[:, None], columns[None, :], keys.rows, diagonal, CAUSAL)
        products = tl.where(seen, products, float("-inf"))
    state, weights, rescale = softmax_step(state, products, scale, TOP, len(q_tile) == 1)
    v_tile = load_operand(values, first_column, TILE_K, BLOCK_DV, V_HEAD_DIM, MASKED)
    accumulator = product(split(weights, v_tile), v_tile, accumulator * rescale[:, None])
    return state, accumulator, ahead


@triton.jit(do_not_specialize=["q_len", "k_len", "diagonal"])
def forward_kernel(
    q,
    k,
    v,
    q_statistics,
    k_statistics,
    v_statistics,
    out,
    lse,
    q_sizes,
    kv_sizes,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    distances,
    group,
    q_len,
    k_len,
    diagonal,
    scale,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    FLIP: tl.constexpr,
):
    """Grid: one program for each (matrix of q, tile of its rows).

    ``scale`` is |scale| * log2(e); FLIP negates q. ``distances`` lead from q, k and v to their further parts.
    """
    tiles = tl.cdiv(q_len, TILE_Q)
    index = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        # The last rows see the most keys: starting with them leaves the short programs to fill the gaps at the end.
        tile = tiles - 1 - tile
    first_row = tile * TILE_Q
    kv_index = index // group
    keys = matrix(k, kv_index, kv_sizes, k_strides, k_len, distances[1], UNITS[1])
    values = matrix(v, kv_index, kv_sizes, v_strides, k_len, distances[2], UNITS[2])
    queries = matrix(q, index, q_sizes, q_strides, q_len, distances[0], UNITS[0])
    q_tile = load_operand(queries, first_row, TILE_Q, BLOCK_D, HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    scale *= unit_of(q_statistics, kv_index) * unit_of(k_statistics, kv_index)
    # A zero scale makes all scores equal; the smallest normal number does too, and -inf times it stays -inf.
    scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    state = softmax_start(TILE_Q)
    accumulator = tl.zeros([TILE_Q, BLOCK_DV], tl.float32)
    whole, edge, end = key_range(first_row, k_len, diagonal, TILE_Q, TILE_K, CAUSAL)
    ahead = ()
    if AHEAD:
        ahead = (products_of(q_tile, keys, 0, HEAD_DIM, BLOCK_D, TILE_K, True),)
        # The tile that comes after the last whole one may not fill its rows: the second loop can look ahead to it.
        whole = tl.maximum(whole - TILE_K, 0)
        edge = tl.maximum(edge - TILE_K, 0)
    for first_column in range(0, whole, TILE_K):
        state, accumulator, ahead = forward_step(
            state, accumulator, ahead, q_tile, keys, values, first_row, first_column, diagonal, scale,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, False,
        )  # fmt: skip
    for first_column in range(edge, end, TILE_K):
        state, accumulator, ahead = forward_step(
            state, accumulator, ahead, q_tile, keys, values, first_row, first_column, diagonal, scale,
            HEAD_DIM, V_HEAD_DIM, BLOCK_D, BLOCK_DV, TILE_Q, TILE_K, CAUSAL, True,
        )  # fmt: skip
    normaliser, row_lse = softmax_finish(state, TOP)
    normaliser *= unit_of(v_statistics, kv_index)
    target = matrix(out, index, q_sizes, out_strides, q_len, (), UNITS[3])
    store_tile(target, accumulator * normaliser[:, None], first_row, TILE_Q, BLOCK_DV, V_HEAD_DIM)
    rows = first_row + tl.arange(0, TILE_Q)
    tl.store(lse + tl.cast(index, tl.int64) * q_len + rows, row_lse, mask=rows < q_len)
