"""The tile scheduler: CTAs claim tiles from a counter, so that faster ones take more, and hand them to their warps."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .pipeline import Pipeline, new_barriers
from .struct import struct

STAGES = gl.constexpr(2)
FIELDS = gl.constexpr(4)
SEQUENCE_FIELDS = gl.constexpr(5)

COMPUTE, RECOMPUTE, STOP = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What consumers do next: compute a tile, compute it again with a safe softmax, or return."""

CLAIM_AHEAD = gl.constexpr(2)
"""Inner tiles before a tile's end at which the next one is claimed: hides the atomic's microsecond, and keeps slow CTAs
from hoarding tiles."""


@struct
class TileScheduler:
    """The CTA's tiles, from the producer warp to the other roles: four numbers each, and with VARLEN five more."""

    pipeline: Pipeline
    VARLEN: gl.constexpr

    @gluon.jit
    def push(self, n, command, tile, seq):
        """Publish the n-th tile."""
        self.pipeline.wait_empty(n)
        first = n % STAGES * FIELDS
        write(self.pipeline.buffers.index(first), command, 1)
        write(self.pipeline.buffers.index(first + 1), tile.batch, 1)
        write(self.pipeline.buffers.index(first + 2), tile.head, 1)
        write(self.pipeline.buffers.index(first + 3), tile.start, 1)
        if self.VARLEN:
            first = n % STAGES * SEQUENCE_FIELDS + STAGES * FIELDS
            write(self.pipeline.buffers.index(first), seq.varlen.outer_start, 1)
            write(self.pipeline.buffers.index(first + 1), seq.outer_len, 1)
            write(self.pipeline.buffers.index(first + 2), seq.inner_len, 1)
            write(self.pipeline.buffers.index(first + 3), seq.varlen.inner_start, 1)
            write(self.pipeline.buffers.index(first + 4), seq.varlen.index, 1)
        mbarrier.arrive(self.pipeline.full_barrier(n), count=1)

    @gluon.jit
    def pop(self, n, WARPS: gl.constexpr):
        """The n-th tile's command, batch, head and first outer row, for a role of WARPS warps."""
        self.pipeline.wait_full(n)
        first = n % STAGES * FIELDS
        command = read(self.pipeline.buffers.index(first), WARPS)
        batch = read(self.pipeline.buffers.index(first + 1), WARPS)
        head = read(self.pipeline.buffers.index(first + 2), WARPS)
        start = read(self.pipeline.buffers.index(first + 3), WARPS)
        if not self.VARLEN:
            self.pipeline.release(n)
        return command, batch, head, start

    @gluon.jit
    def pop_sequence(self, n, tile_map, WARPS: gl.constexpr):
        """After `pop`, unless it was STOP: the tile map of the n-th tile's sequence."""
        seq = tile_map
        if self.VARLEN:
            first = n % STAGES * SEQUENCE_FIELDS + STAGES * FIELDS
            outer_start = read(self.pipeline.buffers.index(first), WARPS)
            outer_len = read(self.pipeline.buffers.index(first + 1), WARPS)
            inner_len = read(self.pipeline.buffers.index(first + 2), WARPS)
            inner_start = read(self.pipeline.buffers.index(first + 3), WARPS)
            index = read(self.pipeline.buffers.index(first + 4), WARPS)
            self.pipeline.release(n)
            seq = tile_map.for_sequence(tile_map.varlen.at(index, outer_start, inner_start), outer_len, inner_len)
        return seq


@struct
class OverflowFlags:
    """Which of the last two tiles overflowed, with a flag for each consumer warp group, and the indices of both."""

    pipeline: Pipeline
    indices: gl.shared_memory_descriptor
    CONSUMERS: gl.constexpr

    @gluon.jit
    def begin(self, n, index):
        """Keep the n-th tile's index."""
        write(self.indices.index(n % STAGES), index, 1)

    @gluon.jit
    def set(self, n, CONSUMER: gl.constexpr, flag):
        """A consumer warp group's flag for the n-th tile."""
        write(self.pipeline.buffers.index(n % STAGES * self.CONSUMERS + CONSUMER), flag, 4)
        mbarrier.arrive(self.pipeline.full_barrier(n), count=1)

    @gluon.jit
    def any(self, n):
        """Whether any flag of the n-th tile is set. Called before tile n + 2 is pushed, whose flags replace it."""
        self.pipeline.wait_full(n)
        flag = 0
        for consumer in gl.static_range(self.CONSUMERS):
            flag |= read(self.pipeline.buffers.index(n % STAGES * self.CONSUMERS + consumer), 1)
        return flag != 0


@struct
class RetryList:
    """For each CTA a stack of the tiles that overflowed, in global memory. The CTA keeps the top, -1 if it is empty.

    links: int32, for each tile of the launch the one below it. A tile is pushed once at most, by the CTA that claimed
    it, so stacks hold nothing else, whatever cu_seqlens say.
    """

    links: gl.tensor

    @gluon.jit
    def push_if_overflowed(self, flags, n, top):
        """The top, after pushing the CTA's n-th tile if it overflowed."""
        if flags.any(n):
            index = read(flags.indices.index(n % STAGES), 1)
            gl.store(self.links + index, top)
            top = index
        return top

    @gluon.jit
    def below(self, index):
        """The tile below another."""
        return gl.load(self.links + index)


@gluon.jit
def claim_tile(counter, num_tiles, ORDERED: gl.constexpr):
    """The next tile's index; ``num_tiles`` or more if none is left.

    counter: int32 in global memory, 0 between launches: the tiles claimed, with ORDERED also the first of each CTA.
    """
    claimed = gl.atomic_add(counter, 1, sem="relaxed")
    claims = num_tiles
    if ORDERED:
        claims += gl.num_programs(0)
    if claimed == claims - 1:
        # Each CTA makes one claim that fails, so this is the launch's last.
        gl.store(counter, 0)
    if not ORDERED:
        claimed += gl.num_programs(0)
    return claimed


@gluon.jit
def first_tile(counter, num_tiles, PERSISTENT: gl.constexpr, ORDERED: gl.constexpr):
    """The index of a CTA's first tile.

    ORDERED: CTAs wait for others that claimed tiles before them. So the first tiles are claimed too: else one would be
    that of a CTA that does not run while another kernel does, and the CTAs that do run might wait for it forever.
    """
    index = gl.program_id(0)
    if ORDERED and PERSISTENT:
        index = claim_tile(counter, num_tiles, ORDERED)
    return index


@gluon.jit
def new_scheduler(READERS: gl.constexpr, VARLEN: gl.constexpr):
    """A scheduler whose tiles are popped by READERS roles."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = FIELDS + SEQUENCE_FIELDS if VARLEN else FIELDS
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES * COUNT, 1], layout)
    return TileScheduler(Pipeline(numbers, new_barriers(STAGES, 1), new_barriers(STAGES, READERS), STAGES), VARLEN)


@gluon.jit
def new_overflow_flags(CONSUMERS: gl.constexpr):
    """Flags of CONSUMERS warp groups."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flags = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, 1], layout)
    written = new_barriers(STAGES, CONSUMERS)
    indices = gl.allocate_shared_memory(gl.int32, [STAGES, 1], layout)
    return OverflowFlags(Pipeline(flags, written, written, STAGES), indices, CONSUMERS)


@gluon.jit
def write(memory, number, WARPS: gl.constexpr):
    """Store a scalar to shared memory (1,)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    memory.store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def read(memory, WARPS: gl.constexpr):
    """Load a scalar from shared memory (1,)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(memory.load(layout), 0)
