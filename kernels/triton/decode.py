"""Decoding: attention of a few new queries over a KV cache, split along the cache (split-KV).

One query makes too few programs to saturate the memory, so each sequence is divided into splits (Dao et al.,
"Flash-Decoding for long-context inference", 2023), which a second kernel merges by their log-sum-exps. The rows of a
program's tile are all new queries of all heads that share a head of k and v, which is read once for all of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..language import tanh
from ..lib.softmax import LOG2_E
from .lib.masks import visible
from .lib.matmul import load, negated, store
from .lib.matrix import Matrix, matrix
from .lib.pow2 import LOW, TOP
from .lib.softmax import SMALLEST, softmax_finish, softmax_start, softmax_step
from .lib.varlen import all_rows


@triton.jit
def slot_scores(q_tile, queries, first_row, keys, first_slot, PRECISION: tl.constexpr, C: tl.constexpr):
    """q @ k.T of a tile of keys; heads wider than a tile are summed over slices of columns."""
    if C.HEAD_DIM <= C.BLOCK_D:
        k_tile = load(keys, first_slot, 0, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, True)
        s = tl.dot(q_tile[0], k_tile[0].T, input_precision=PRECISION)
    else:
        s = tl.zeros([C.TILE_Q, C.TILE_K], tl.float32)
        for first in range(0, C.HEAD_DIM, C.BLOCK_D):
            q_slice = load(queries, first_row, first, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
            k_slice = load(keys, first_slot, first, C.TILE_K, C.BLOCK_D, C.HEAD_DIM, True)
            s = tl.dot(q_slice[0], k_slice[0].T, s, input_precision=PRECISION)
    return s


@triton.jit
def split_range(length, first, split, splits, TILE_K: tl.constexpr):
    """The slots of one split. Tiles from ``first`` to ``length`` are divided evenly; the last splits may be empty."""
    begin = first // TILE_K
    tiles = tl.maximum(tl.cdiv(length, TILE_K) - begin, 0)
    each = tiles // splits
    longer = tiles % splits
    begin += split * each + tl.minimum(split, longer)
    end = begin + each + (split < longer).to(tl.int32)
    return begin * TILE_K, tl.minimum(end * TILE_K, length)


@triton.jit(do_not_specialize=["rows", "new", "capacity", "before", "heads", "splits"])
def decode_kernel(
    q, k, v, lengths, out, lse, sizes, q_strides, k_strides, v_strides,
    rows, new, capacity, before, heads, splits, scale, softcap,
    C: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FLIP: tl.constexpr, STRIDE_MULTIPLES: tl.constexpr,
    PRECISION: tl.constexpr, LAUNCHES_EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (batch-heads of k * splits * tiles of rows, slices of v's columns).

    q is (batch, kv_heads, rows, d); rows are the ``new`` queries of the group's first head, then of its second, and so
    on. out (batch, kv_heads, rows, splits, dv) and lse (batch, kv_heads, rows, splits) are contiguous. ``lengths``:
    filled slots of each sequence, new tokens included. With WINDOW a query sees ``before`` slots before its own.
    ``scale`` is |scale|, times log2(e) without SOFTCAP; FLIP negates q. LAUNCHES_EARLY: `merge_kernel` may start when
    all programs have, and waits for them.
    """
    if LAUNCHES_EARLY:
        gdc_launch_dependents()
    tiles = tl.cdiv(rows, C.TILE_Q)
    program = tl.program_id(0)
    first_row = program % tiles * C.TILE_Q
    split = program // tiles % splits
    kv_head = program // tiles // splits
    # Clamped before the cast: what exceeds 32 bits exceeds the capacity.
    length = tl.minimum(tl.maximum(tl.load(lengths + kv_head // heads), 0), capacity).to(tl.int32)
    # The first new query's slot; negative where a sequence has fewer slots than there are new queries.
    position = length - new
    first_seen = position * 0
    if WINDOW:
        first_seen = tl.maximum(position - before, 0)
    begin, end = split_range(length, first_seen, split, splits, C.TILE_K)
    queries = matrix(q, kv_head, sizes, q_strides, all_rows(rows), (), STRIDE_MULTIPLES[0])
    keys = matrix(k, kv_head, sizes, k_strides, all_rows(length), (), STRIDE_MULTIPLES[1])
    values = matrix(v, kv_head, sizes, v_strides, all_rows(length), (), STRIDE_MULTIPLES[2])
    q_tile = load(queries, first_row, 0, C.TILE_Q, C.BLOCK_D, C.HEAD_DIM, True)
    if FLIP:
        q_tile = negated(q_tile)
    v_columns = tl.program_id(1) * C.BLOCK_DV
    query = ((first_row + tl.arange(0, C.TILE_Q)) % new)[:, None]
    SHIFT: tl.constexpr = TOP if v.dtype.element_ty == tl.float16 else LOW
    state = softmax_start(C.TILE_Q, None, 0, SHIFT)
    acc = tl.zeros([C.TILE_Q, C.BLOCK_DV], tl.float32)
    scale = tl.where(scale > SMALLEST, scale, SMALLEST)
    for first_slot in range(begin, end, C.TILE_K):
        s = slot_scores(q_tile, queries, first_row, keys, first_slot, PRECISION, C)
        factor = scale
        if FLIP and C.HEAD_DIM > C.BLOCK_D:
            s = -s
        if SOFTCAP:
            s = softcap * tanh(s * scale / softcap)
            factor = LOG2_E
        slots = first_slot + tl.arange(0, C.TILE_K)[None, :]
        s = tl.where(visible(query, slots, length, position - before, position, WINDOW, True), s, float("-inf"))
        state, p, rescale = softmax_step(state, s, factor, SHIFT, True)
        v_tile = load(values, first_slot, v_columns, C.TILE_K, C.BLOCK_DV, C.V_HEAD_DIM, True)
        p = p.to(v_tile[0].dtype)
        acc = tl.dot(p, v_tile[0], acc * rescale[:, None], input_precision=PRECISION)
    normaliser, row_lse = softmax_finish(state, SHIFT)
    first = tl.cast(kv_head, tl.int64) * rows * splits + split
    target = Matrix(out + first * C.V_HEAD_DIM, tl.cast(splits, tl.int64) * C.V_HEAD_DIM, 1, rows, ())
    store(target, acc * normaliser[:, None], first_row, v_columns, C.TILE_Q, C.BLOCK_DV, C.V_HEAD_DIM)
    row = first_row + tl.arange(0, C.TILE_Q)
    tl.store(lse + first + tl.cast(row, tl.int64) * splits, row_lse, mask=row < rows)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    split_out, split_lse, out, lse, splits,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, LAUNCHES_EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: one program per row. split_out (rows, splits, WIDTH), split_lse (rows, splits); all contiguous.

    SPLITS: the next power of two of ``splits``. AT_ONCE: how many splits are added at a time.
    """
    if LAUNCHES_EARLY:
        gdc_wait()
    row = tl.cast(tl.program_id(0), tl.int64)
    numbers = tl.arange(0, SPLITS)
    lses = tl.load(split_lse + row * splits + numbers, mask=numbers < splits, other=float("-inf"))
    largest = tl.max(lses, 0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(lses - pivot), 0)
    columns = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for first in range(0, splits, AT_ONCE):
        chunk = first + tl.arange(0, AT_ONCE)
        exists = chunk < splits
        factors = tl.exp(tl.load(split_lse + row * splits + chunk, mask=exists, other=float("-inf")) - pivot)
        pointers = split_out + (row * splits + chunk)[:, None] * WIDTH + columns[None, :]
        tile = tl.load(pointers, mask=exists[:, None] & (columns < WIDTH)[None, :], other=0.0)
        acc += tl.sum(factors[:, None] * tile, 0)
    blind = total == 0.0
    merged = acc / tl.where(blind, 1.0, total)
    tl.store(out + row * WIDTH + columns, merged.to(out.dtype.element_ty), mask=columns < WIDTH)
    tl.store(lse + row, tl.where(blind, float("-inf"), pivot + tl.log(total)))
