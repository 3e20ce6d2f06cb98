"""The forward's shared memory, and its producer warp, which also claims tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..versions import async_load
from .lib.mma import WG_ROWS
from .lib.pair_tiles import PairTensor, PairTiles, pair_bytes
from .lib.pipeline import Pipeline, new_barriers, new_buffers
from .lib.scheduler import (
    CLAIM_AHEAD,
    COMPUTE,
    RECOMPUTE,
    STOP,
    OverflowFlags,
    RetryList,
    TileScheduler,
    claim_tile,
    first_tile,
    new_overflow_flags,
    new_scheduler,
)
from .lib.struct import struct


@struct
class Tensors:
    """Tensors in global memory: TMA descriptors, the log-sum-exp, the workspace (`lib.scheduler`), and
    with SINKS a logit for each head.

    Tails are the columns beyond HEAD_DIM of a split head dimension: K_TAIL of q and k, V_TAIL of v and out, perhaps 0.
    """

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    out: tma.tensor_descriptor
    q_tail: tma.tensor_descriptor
    k_tail: tma.tensor_descriptor
    v_tail: tma.tensor_descriptor
    out_tail: tma.tensor_descriptor
    lse: gl.tensor
    workspace: gl.tensor
    sinks: gl.tensor
    pairs: PairTensor
    HEAD_DIM: gl.constexpr
    K_TAIL: gl.constexpr
    V_TAIL: gl.constexpr
    SINKS: gl.constexpr


@struct
class SharedMemory:
    """What warps share: a tile of q for each consumer warp group, pipelines of k and v, output buffers, the scheduler.

    Tails lie in the same stages as the tiles they belong to, and arrive at the same barriers. So do, with a tile of k,
    the pairs of each consumer warp group's rows with its keys (`PairTensor`).
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    out: gl.shared_memory_descriptor
    scheduler: TileScheduler
    overflow: OverflowFlags
    q_tail: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    out_tail: gl.shared_memory_descriptor
    pairs: PairTiles


@gluon.jit
def new_memory(
    tensors, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SEPARATE_OUT: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Allocate it. SEPARATE_OUT: whether out has other buffers than q, so that q can be loaded earlier."""
    q = Pipeline(new_buffers(tensors.q, CONSUMERS), new_barriers(1, 1), new_barriers(1, CONSUMERS), 1)
    # One release covers a step's k and the v of the step before.
    empty = new_barriers(STAGES, CONSUMERS)
    k = Pipeline(new_buffers(tensors.k, STAGES), new_barriers(STAGES, 1), empty, STAGES)
    v = Pipeline(new_buffers(tensors.v, STAGES), new_barriers(STAGES, 1), empty, STAGES)
    out = q.buffers
    if SEPARATE_OUT:
        out = new_buffers(tensors.out, CONSUMERS)
    q_tail, k_tail, v_tail, out_tail = q.buffers, k.buffers, v.buffers, out
    if tensors.V_TAIL > 0:
        v_tail = new_buffers(tensors.v_tail, STAGES)
        out_tail = new_buffers(tensors.out_tail, CONSUMERS)
    scheduler = new_scheduler(CONSUMERS, VARLEN)
    overflow = new_overflow_flags(CONSUMERS)
    if tensors.K_TAIL > 0:
        q_tail = new_buffers(tensors.q_tail, CONSUMERS)
        k_tail = new_buffers(tensors.k_tail, STAGES)
    pairs = tensors.pairs.new_tiles(STAGES, CONSUMERS, k.buffers)
    return SharedMemory(q, k, v, out, scheduler, overflow, q_tail, k_tail, v_tail, out_tail, pairs)


@gluon.jit
def producer(tensors, memory, tile_map, heads_per_kv, PERSISTENT: gl.constexpr):
    """The producer warp: claims tiles, and loads what each needs; at last again for those on the retry list."""
    counter = tensors.workspace
    retries = RetryList(counter + 1)
    num_tiles = tile_map.num_tiles()
    n = 0
    turn = 0
    index = first_tile(counter, num_tiles, PERSISTENT, False)
    top = -1
    while index < num_tiles:
        tile, seq = tile_map.tile_at(index)
        if seq.has_rows(tile):
            if turn > 1:
                top = retries.push_if_overflowed(memory.overflow, turn - 2, top)
            memory.overflow.begin(turn, index)
            n, index = load_tile(tensors, memory, tile, seq, heads_per_kv, COMPUTE, num_tiles, turn, n, PERSISTENT)
            turn += 1
        elif PERSISTENT:
            index = claim_tile(counter, num_tiles, False)
        else:
            index = num_tiles
    for late in range(gl.maximum(turn - 2, 0), turn):
        top = retries.push_if_overflowed(memory.overflow, late, top)
    while top >= 0:
        index = top
        top = retries.below(index)
        tile, seq = tile_map.tile_at(index)
        n, _ = load_tile(tensors, memory, tile, seq, heads_per_kv, RECOMPUTE, num_tiles, turn, n, False)
        turn += 1
    tile, seq = tile_map.tile_at(0)
    memory.scheduler.push(turn, STOP, tile, seq)


@gluon.jit
def load_tile(tensors, memory, tile, seq, heads_per_kv, command, num_tiles, turn, n, CLAIM: gl.constexpr):
    """Push a tile, and load its q, and k and v from the last inner tile to the first.

    ``n`` counts inner tiles. Returns it, and the index of the next tile, claimed shortly before the end if CLAIM.
    """
    TILE_K: gl.constexpr = seq.INNER_TILE
    K_BYTES: gl.constexpr = (tensors.HEAD_DIM + tensors.K_TAIL) * 2
    V_BYTES: gl.constexpr = (tensors.HEAD_DIM + tensors.V_TAIL) * 2
    CONSUMERS: gl.constexpr = memory.overflow.CONSUMERS
    PAIR_BYTES: gl.constexpr = pair_bytes(tensors.pairs.ARGUMENT, tensors.pairs.desc.dtype, CONSUMERS * WG_ROWS, TILE_K)
    memory.scheduler.push(turn, command, tile, seq)
    tile = seq.listed(tile, tile.head)
    kv_head = tile.head // heads_per_kv
    following = num_tiles
    claim_at = gl.minimum(tile.begin + CLAIM_AHEAD, tile.end - 1)
    for position in range(tile.end - 1, tile.begin - 1, -1):
        inner = seq.visited(position, tile)
        coords = seq.inner_coords(tile.batch, kv_head, inner * TILE_K, 0)
        memory.k.wait_empty(n)
        tail_coords = seq.inner_coords(tile.batch, kv_head, inner * TILE_K, tensors.HEAD_DIM)
        mbarrier.expect(memory.k.full_barrier(n), TILE_K * K_BYTES + PAIR_BYTES)
        async_load(tensors.k, coords, memory.k.full_barrier(n), memory.k.buffer(n))
        if tensors.K_TAIL > 0:
            async_load(tensors.k_tail, tail_coords, memory.k.full_barrier(n), memory.k_tail.index(memory.k.stage(n)))
        if tensors.pairs.ARGUMENT is not None:
            for consumer in gl.static_range(CONSUMERS):
                row = tile.start + consumer * WG_ROWS
                buffer = memory.pairs.buffer(memory.k.stage(n), consumer)
                tensors.pairs.load(tile.batch, tile.head, row, inner * TILE_K, memory.k.full_barrier(n), buffer)
        if position == tile.end - 1:
            # After the first k, whose buffer is free before q's is.
            load_q(tensors, memory, seq, tile, turn, K_BYTES)
        if CLAIM:  # noqa: SIM102 - known when compiled
            if position == claim_at:
                following = claim_tile(tensors.workspace, num_tiles, False)
        memory.v.wait_empty(n + 1)
        mbarrier.expect(memory.v.full_barrier(n), TILE_K * V_BYTES)
        async_load(tensors.v, coords, memory.v.full_barrier(n), memory.v.buffer(n))
        if tensors.V_TAIL > 0:
            async_load(tensors.v_tail, tail_coords, memory.v.full_barrier(n), memory.v_tail.index(memory.v.stage(n)))
        n += 1
    return n, following


@gluon.jit
def load_q(tensors, memory, seq, tile, turn, ROW_BYTES: gl.constexpr):
    """Load each consumer warp group's rows of q."""
    CONSUMERS: gl.constexpr = memory.overflow.CONSUMERS
    memory.q.wait_empty(turn)
    full = memory.q.full_barrier(turn)
    mbarrier.expect(full, CONSUMERS * WG_ROWS * ROW_BYTES)
    for consumer in gl.static_range(CONSUMERS):
        row = tile.start + consumer * WG_ROWS
        async_load(tensors.q, seq.outer_coords(tile.batch, tile.head, row, 0), full, memory.q.buffers.index(consumer))
        if tensors.K_TAIL > 0:
            coords = seq.outer_coords(tile.batch, tile.head, row, tensors.HEAD_DIM)
            async_load(tensors.q_tail, coords, full, memory.q_tail.index(consumer))
