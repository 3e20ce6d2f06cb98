"""Attention of a few new queries over a cache of keys and values: one program for each part of a sequence.

A single query needs too few programs to keep a GPU reading, so each sequence is divided into parts (Dao et al.,
"Flash-Decoding for long-context inference", 2023). The rows of a program's tile are all new queries of all heads that
share a matrix of keys: that is read once for all of them. What the parts find is merged by their log-sum-exps.
"""

import triton
import triton.language as tl

from ..language import tanh
from .addresses import Matrix, matrix
from .masks import visible
from .operands import negated
from .sequences import whole
from .slices import load_slice, store_slice
from .softmax import LOG2_E, softmax_finish, softmax_start, softmax_step
from .units import LOW, TOP

SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def scores_of_slots(
    q_tile,
    queries,
    first_row,
    keys,
    first_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each row of q's tile times each of a tile of keys; heads wider than a tile are summed over slices of columns."""
    if HEAD_DIM <= BLOCK_D:
        k_tile = load_slice(keys, first_slot, 0, TILE_K, BLOCK_D, HEAD_DIM, True)
        products = tl.dot(q_tile[0], k_tile[0].T, input_precision=PRECISION)
    else:
        products = tl.zeros([TILE_Q, TILE_K], tl.float32)
        for first in range(0, HEAD_DIM, BLOCK_D):
            q_slice = load_slice(queries, first_row, first, TILE_Q, BLOCK_D, HEAD_DIM, True)
            k_slice = load_slice(keys, first_slot, first, TILE_K, BLOCK_D, HEAD_DIM, True)
            products = tl.dot(q_slice[0], k_slice[0].T, products, input_precision=PRECISION)
    return products


@triton.jit
def slots_of_part(length, first, part, parts, TILE_K: tl.constexpr):
    """The slots of one of the parts into which those from ``first`` to ``length`` are divided, as evenly as tiles go.

    A sequence of fewer tiles than parts leaves the last parts without any.
    """
    begin = first // TILE_K
    tiles = tl.maximum(tl.cdiv(length, TILE_K) - begin, 0)
    each = tiles // parts
    longer = tiles % parts
    begin += part * each + tl.minimum(part, longer)
    end = begin + each + (part < longer).to(tl.int32)
    return begin * TILE_K, tl.minimum(end * TILE_K, length)


@triton.jit(do_not_specialize=["rows", "new", "capacity", "before", "heads", "parts"])
def cached_kernel(
    q,
    k,
    v,
    lengths,
    out,
    lse,
    sizes,
    q_strides,
    k_strides,
    v_strides,
    rows,
    new,
    capacity,
    before,
    heads,
    parts,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FLIP: tl.constexpr,
    UNITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: one program for each (matrix of keys, part, tile of rows), and slice of v's columns (see `slices`).

    q is (batch, kv_heads, rows, d), rows being those of the group's first head, ``new`` of them, then its second's, and
    so on. out (batch, kv_heads, rows, parts, dv) and lse (batch, kv_heads, rows, parts) are contiguous. ``before`` is
    how many slots before its own a query sees, with WINDOW. ``scale`` is |scale|, times log2(e) unless scores are
    capped; FLIP negates q.
    """
    tiles = tl.cdiv(rows, TILE_Q)
    program = tl.program_id(0)
    first_row = program % tiles * TILE_Q
    part = program // tiles % parts
    index = program // tiles // parts
    # Before it is cast: what is beyond 32 bits is beyond the capacity.
    length = tl.minimum(tl.maximum(tl.load(lengths + index // heads), 0), capacity).to(tl.int32)
    # Of the first of the new queries; it may be negative, where a sequence has fewer slots than there are queries.
    position = length - new
    first_seen = position * 0
    if WINDOW:
        first_seen = tl.maximum(position - before, 0)
    begin, end = slots_of_part(length, first_seen, part, parts, TILE_K)
    queries = matrix(q, index, sizes, q_strides, whole(rows), (), UNITS[0])
    keys = matrix(k, index, sizes, k_strides, whole(length), (), UNITS[1])
    values = matrix(v, index, sizes, v_strides, whole(length), (), UNITS[2])
    q_tile = load_slice(queries, first_row, 0, TILE_Q, BLOCK_D, HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    own_columns = tl.program_id(1) * BLOCK_DV
    places = ((first_row + tl.arange(0, TILE_Q)) % new)[:, None]
    SHIFT: tl.constexpr = TOP if v.dtype.element_ty == tl.float16 else LOW
    state = softmax_start(TILE_Q, None, 0, SHIFT)
    accumulator = tl.zeros([TILE_Q, BLOCK_DV], tl.float32)
    # A zero scale makes all scores equal; the smallest normal number does too, and -inf times it stays -inf.
    scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    for first_slot in range(begin, end, TILE_K):
        products = scores_of_slots(
            q_tile, queries, first_row, keys, first_slot, HEAD_DIM, BLOCK_D, TILE_Q, TILE_K, PRECISION
        )
        factor = scale
        if FLIP and HEAD_DIM > BLOCK_D:
            products = -products
        if SOFTCAP:
            products = softcap * tanh(products * scale / softcap)
            factor = LOG2_E
        slots = first_slot + tl.arange(0, TILE_K)[None, :]
        seen = visible(places, slots, length, position - before, position, WINDOW, True)
        products = tl.where(seen, products, float("-inf"))
        state, weights, rescale = softmax_step(state, products, factor, SHIFT, True)
        v_tile = load_slice(values, first_slot, own_columns, TILE_K, BLOCK_DV, V_HEAD_DIM, True)
        weights = weights.to(v_tile[0].dtype)
        accumulator = tl.dot(weights, v_tile[0], accumulator * rescale[:, None], input_precision=PRECISION)
    normaliser, row_lse = softmax_finish(state, SHIFT)
    first = tl.cast(index, tl.int64) * rows * parts + part
    target = Matrix(out + first * V_HEAD_DIM, tl.cast(parts, tl.int64) * V_HEAD_DIM, 1, rows, ())
    store_slice(target, accumulator * normaliser[:, None], first_row, own_columns, TILE_Q, BLOCK_DV, V_HEAD_DIM)
    own_rows = first_row + tl.arange(0, TILE_Q)
    tl.store(lse + first + tl.cast(own_rows, tl.int64) * parts, row_lse, mask=own_rows < rows)


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    parts,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Grid: one program for each row. All tensors are contiguous; those of parts have an axis for these after the rows.

    PARTS is a power of two from the number of parts on, and AT_ONCE how many are added up at a time.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    numbers = tl.arange(0, PARTS)
    lses = tl.load(partial_lse + row * parts + numbers, mask=numbers < parts, other=float("-inf"))
    largest = tl.max(lses, 0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lses - pivot), 0)
    columns = tl.arange(0, BLOCK)
    accumulator = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, AT_ONCE):
        own = first + tl.arange(0, AT_ONCE)
        exists = own < parts
        weights = tl.exp(tl.load(partial_lse + row * parts + own, mask=exists, other=float("-inf")) - pivot)
        pointers = partial_out + (row * parts + own)[:, None] * WIDTH + columns[None, :]
        tile = tl.load(pointers, mask=exists[:, None] & (columns < WIDTH)[None, :], other=0.0)
        accumulator += tl.sum(weights[:, None] * tile, 0)
    blind = total == 0.0
    merged = accumulator / tl.where(blind, 1.0, total)
    tl.store(out + row * WIDTH + columns, merged.to(out.dtype.element_ty), mask=columns < WIDTH)
    tl.store(lse + row, tl.where(blind, float("-inf"), pivot + tl.log(total)))
