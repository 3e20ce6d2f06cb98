"""The backward's shared memory, its producer warp, which also claims tiles, and the warp that adds up dQ."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..versions import async_load
from .lib import named_barriers
from .lib.mma import WG_ROWS
from .lib.pair_tiles import PairTensor, PairTiles, pair_bytes
from .lib.pipeline import NamedPipeline, new_barriers, new_buffers
from .lib.scheduler import CLAIM_AHEAD, COMPUTE, STOP, TileScheduler, claim_tile, first_tile, new_scheduler
from .lib.struct import struct


@struct
class Tensors:
    """Tensors in global memory: TMA descriptors, and the workspace, whose first element counts claimed tiles.

    Tails are the columns beyond those of the first descriptors: K_TAIL of q and k, V_TAIL of dout and v, perhaps 0.
    ORDERED: see `lib.scheduler.first_tile`.
    """

    q: tma.tensor_descriptor
    dout: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    lse2: tma.tensor_descriptor
    delta: tma.tensor_descriptor
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    q_tail: tma.tensor_descriptor
    k_tail: tma.tensor_descriptor
    dk_tail: tma.tensor_descriptor
    dout_tail: tma.tensor_descriptor
    v_tail: tma.tensor_descriptor
    dv_tail: tma.tensor_descriptor
    workspace: gl.tensor
    pairs: PairTensor
    K_TAIL: gl.constexpr
    V_TAIL: gl.constexpr
    ORDERED: gl.constexpr


@struct
class SharedMemory:
    """What warps share.

    k, v: the CTA's tile of keys; v in a buffer for each 64 of them. k arrives with its first q, v with its first dout.
    k_empty, v_empty: mbarriers: consumers do not read them any more, nor need v's buffers to store gradients.
    never: an mbarrier at which nobody arrives, if steps wait for its last phase, which is complete; else k_empty.
    q, dout: pipelines. lse2 and delta, of their rows, lie in the same stages.
    pairs: those of a tile of q with each 64 keys (`PairTensor`), in the stages of pair_pipeline: q's, or a single one.
    ds: two tiles (keys, rows of q) of dS, or one if 128 columns have a tail. p_or_dq: two tiles of P if consumers share
    keys, else a half of a dQ tile for each consumer warp group; with tails pieces of 32 columns, two for each warp
    group, then one for each, but two, one and an unused one where 64 columns have a tail.
    q_tail, k_tail, dout_tail, v_tail: tails, in the same stages; they arrive at the same barriers.
    """

    scheduler: TileScheduler
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    never: gl.shared_memory_descriptor
    q: NamedPipeline
    dout: NamedPipeline
    lse2: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    p_or_dq: gl.shared_memory_descriptor
    pairs: PairTiles
    pair_pipeline: NamedPipeline
    q_tail: gl.shared_memory_descriptor
    k_tail: gl.shared_memory_descriptor
    dout_tail: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    K_TAIL: gl.constexpr
    V_TAIL: gl.constexpr

    @gluon.jit
    def drain(self, n):
        """Wait until all of n tiles are released."""
        self.q.drain(n)
        self.dout.drain(n)
        if self.pair_pipeline.stages < self.q.stages:
            self.pair_pipeline.drain(n)


@gluon.jit
def new_pipeline(desc, STAGES: gl.constexpr, EMPTY: gl.constexpr):
    """A pipeline of a descriptor's tiles, which both consumer warp groups release."""
    return NamedPipeline(
        new_buffers(desc, STAGES), new_barriers(STAGES, 1), EMPTY, named_barriers.CONSUMERS, STAGES
    )  # fmt: skip


@gluon.jit
def new_memory(
    tensors, dq, STAGES: gl.constexpr, PAIR_STAGES: gl.constexpr, NEVER: gl.constexpr, VARLEN: gl.constexpr,
):  # fmt: skip
    """Allocate it. dq: a descriptor, or a pointer if consumers share keys. NEVER: whether steps wait for ``never``."""
    KEYS: gl.constexpr = tensors.k.block_shape[-2]
    TILE_Q: gl.constexpr = tensors.q.block_shape[-2]
    SHARED_KEYS: gl.constexpr = KEYS == WG_ROWS
    dtype: gl.constexpr = tensors.q.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, TILE_Q], dtype)
    k_empty = new_barriers(1, 2).index(0)
    never = k_empty
    if NEVER:
        never = new_barriers(1, 1).index(0)
    # Without a dQ reducer one role fewer pops tiles.
    scheduler = new_scheduler(2 if SHARED_KEYS else 3, VARLEN)
    k = new_buffers(tensors.k, 1)
    v = new_buffers(tensors.v, KEYS // WG_ROWS)
    v_empty = new_barriers(1, 2).index(0)
    q = new_pipeline(tensors.q, STAGES, named_barriers.Q_EMPTY)
    dout = new_pipeline(tensors.dout, STAGES, named_barriers.DOUT_EMPTY)
    lse2 = new_buffers(tensors.lse2, STAGES)
    delta = new_buffers(tensors.delta, STAGES)
    ONE_DS: gl.constexpr = tensors.K_TAIL > 0 and tensors.q.block_shape[-1] > WG_ROWS and not SHARED_KEYS
    ds = gl.allocate_shared_memory(dtype, [1 if ONE_DS else 2, KEYS, TILE_Q], layout)
    q_tail, k_tail, dout_tail, v_tail = q.buffers, k, dout.buffers, v
    if tensors.K_TAIL > 0:
        q_tail, k_tail = new_buffers(tensors.q_tail, STAGES), new_buffers(tensors.k_tail, 1)
    if SHARED_KEYS:
        p_or_dq = gl.allocate_shared_memory(dtype, [2, KEYS, TILE_Q], layout)
    elif tensors.K_TAIL > 0:
        # An even number, for `first_dq_buffer`.
        p_or_dq = new_buffers(dq, 6 if ONE_DS else 4)
    else:
        p_or_dq = new_buffers(dq, 2)
    if tensors.V_TAIL > 0:
        dout_tail, v_tail = new_buffers(tensors.dout_tail, STAGES), new_buffers(tensors.v_tail, KEYS // WG_ROWS)
    pairs = tensors.pairs.new_tiles(PAIR_STAGES, KEYS // WG_ROWS, k)
    pair_pipeline = q
    if pairs.ARGUMENT is not None and PAIR_STAGES < STAGES:
        pair_pipeline = NamedPipeline(
            pairs.buffers, new_barriers(1, 1), named_barriers.PAIRS_EMPTY, named_barriers.CONSUMERS, 1
        )  # fmt: skip
    return SharedMemory(
        scheduler, k, v, k_empty, v_empty, never, q, dout, lse2, delta, ds, p_or_dq, pairs, pair_pipeline,
        q_tail, k_tail, dout_tail, v_tail, tensors.K_TAIL, tensors.V_TAIL,
    )  # fmt: skip


@gluon.jit
def producer(tensors, memory, tile_map, heads_per_kv, PERSISTENT: gl.constexpr):
    """The producer warp: claims tiles of keys, and loads what each needs."""
    produce(tensors, memory, tile_map, heads_per_kv, PERSISTENT, load_step)


@gluon.jit
def produce(tensors, memory, tile_map, heads_per_kv, PERSISTENT: gl.constexpr, LOAD: gl.constexpr):
    """The same, with LOAD for each step."""
    num_tiles = tile_map.num_tiles()
    n = 0
    turn = 0
    index = first_tile(tensors.workspace, num_tiles, PERSISTENT, tensors.ORDERED)
    while index < num_tiles:
        tile, seq = tile_map.tile_at(index)
        index = num_tiles
        first = n
        if seq.has_rows(tile):
            n, index = load_tile(tensors, memory, tile, seq, heads_per_kv, num_tiles, turn, n, PERSISTENT, LOAD)
            turn += 1
        if PERSISTENT and tile_map.varlen.VARLEN:  # noqa: SIM102 - known when compiled
            if n == first:
                index = claim_tile(tensors.workspace, num_tiles, tensors.ORDERED)
    tile, seq = tile_map.tile_at(0)
    memory.scheduler.push(turn, STOP, tile, seq)
    memory.drain(n)


@gluon.jit
def load_tile(
    tensors, memory, tile, seq, heads_per_kv, num_tiles, turn, n, CLAIM: gl.constexpr, LOAD: gl.constexpr
):  # fmt: skip
    """Push a tile, load its k and v, and all q and dout that see it, for each query head of the group.

    ``n`` counts tiles of q. Returns it, and the index of the next tile, claimed shortly before the end if CLAIM.
    """
    heads = seq.heads_to_visit(heads_per_kv)
    if seq.varlen.VARLEN:  # noqa: SIM102 - known when compiled
        if heads == 0:
            # Consumers wait for no load of this tile. If it were pushed now, they could be two turns ahead of the
            # waits below, which distinguish only the parity of a turn.
            mbarrier.wait(memory.k_empty, (turn - 1) & 1, pred=turn > 0)
            mbarrier.wait(memory.v_empty, (turn - 1) & 1, pred=turn > 0)
    memory.scheduler.push(turn, COMPUTE, tile, seq)
    following = num_tiles
    first = n
    for member in range(heads):
        visits = seq.for_member(tile, member, heads_per_kv)
        claim_at = gl.maximum(visits.end - 1 - CLAIM_AHEAD, visits.begin)
        for inner in range(visits.begin, visits.end):
            row = seq.visited(inner, visits) * seq.INNER_TILE
            LOAD(tensors, memory, seq, tile, heads_per_kv, member, row, turn, n, first)
            if CLAIM:  # noqa: SIM102 - known when compiled
                if (member == heads - 1) & (inner == claim_at):
                    following = claim_tile(tensors.workspace, num_tiles, tensors.ORDERED)
            n += 1
    return n, following


@gluon.jit
def load_step(tensors, memory, seq, tile, heads_per_kv, member, row, turn, n, first):
    """Load the n-th tile of q and dout with lse2 and delta, from a row of a query head on; k and v with the first."""
    KEYS: gl.constexpr = seq.OUTER_TILE
    TILE_Q: gl.constexpr = seq.INNER_TILE
    HEAD_DIM: gl.constexpr = tensors.q.block_shape[-1]
    BYTES: gl.constexpr = TILE_Q * HEAD_DIM * 2 + TILE_Q * 4
    PAIR_BYTES: gl.constexpr = pair_bytes(tensors.pairs.ARGUMENT, tensors.pairs.desc.dtype, TILE_Q, KEYS)
    PAIRS_ALONE: gl.constexpr = memory.pair_pipeline.stages < memory.q.stages
    Q_BYTES: gl.constexpr = BYTES + TILE_Q * tensors.K_TAIL * 2 + (0 if PAIRS_ALONE else PAIR_BYTES)
    DOUT_BYTES: gl.constexpr = BYTES + TILE_Q * tensors.V_TAIL * 2
    head = tile.head * heads_per_kv + member
    batch_head = tile.batch_head * heads_per_kv + member
    coords = seq.inner_coords(tile.batch, head, row, 0)
    row_coords = [batch_head, seq.padded_inner_start() + row]
    stage = memory.q.stage(n)
    memory.q.wait_empty(n)
    full = memory.q.full_barrier(n)
    mbarrier.expect(full, Q_BYTES + KEYS * (HEAD_DIM + tensors.K_TAIL) * 2, pred=n == first)
    mbarrier.expect(full, Q_BYTES, pred=n > first)
    async_load(tensors.q, coords, full, memory.q.buffer(n))
    if tensors.K_TAIL > 0:
        tail_coords = seq.inner_coords(tile.batch, head, row, HEAD_DIM)
        async_load(tensors.q_tail, tail_coords, full, memory.q_tail.index(stage))
    async_load(tensors.lse2, row_coords, full, memory.lse2.index(stage))
    if not PAIRS_ALONE:
        load_pairs(tensors, memory, tile, head, row, full, stage, KEYS)
    if n == first:
        mbarrier.wait(memory.k_empty, (turn - 1) & 1, pred=turn > 0)
        k_coords = seq.outer_coords(tile.batch, tile.head, tile.start, 0)
        async_load(tensors.k, k_coords, full, memory.k.index(0))
        if tensors.K_TAIL > 0:
            k_tail_coords = seq.outer_coords(tile.batch, tile.head, tile.start, HEAD_DIM)
            async_load(tensors.k_tail, k_tail_coords, full, memory.k_tail.index(0))
    memory.dout.wait_empty(n)
    full = memory.dout.full_barrier(n)
    mbarrier.expect(full, DOUT_BYTES + KEYS * (HEAD_DIM + tensors.V_TAIL) * 2, pred=n == first)
    mbarrier.expect(full, DOUT_BYTES, pred=n > first)
    async_load(tensors.dout, coords, full, memory.dout.buffer(n))
    if tensors.V_TAIL > 0:
        tail_coords = seq.inner_coords(tile.batch, head, row, HEAD_DIM)
        async_load(tensors.dout_tail, tail_coords, full, memory.dout_tail.index(stage))
    async_load(tensors.delta, row_coords, full, memory.delta.index(stage))
    if n == first:
        mbarrier.wait(memory.v_empty, (turn - 1) & 1, pred=turn > 0)
        for piece in gl.static_range(KEYS // WG_ROWS):
            v_coords = seq.outer_coords(tile.batch, tile.head, tile.start + piece * WG_ROWS, 0)
            async_load(tensors.v, v_coords, full, memory.v.index(piece))
            if tensors.V_TAIL > 0:
                v_tail_coords = seq.outer_coords(tile.batch, tile.head, tile.start + piece * WG_ROWS, HEAD_DIM)
                async_load(tensors.v_tail, v_tail_coords, full, memory.v_tail.index(piece))
    if PAIRS_ALONE:
        memory.pair_pipeline.wait_empty(n)
        full = memory.pair_pipeline.full_barrier(n)
        mbarrier.expect(full, PAIR_BYTES)
        load_pairs(tensors, memory, tile, head, row, full, 0, KEYS)


@gluon.jit
def load_pairs(tensors, memory, tile, head, row, full, stage, KEYS: gl.constexpr):
    """Load the pairs of a tile of q with the keys, where rules read a `PairTensor`."""
    if tensors.pairs.ARGUMENT is not None:
        for piece in gl.static_range(KEYS // WG_ROWS):
            key = tile.start + piece * WG_ROWS
            tensors.pairs.load(tile.batch, head, row, key, full, memory.pairs.buffer(stage, piece))
