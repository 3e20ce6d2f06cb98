"""Tiles in shared memory that one warp fills and others empty, in turn."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..versions import aggregate
from . import named


@gluon.jit
def stage(self, number):
    """Where a tile lies. Steps wait for it, and division of signed numbers takes longer than their bits."""
    if self.stages & (self.stages - 1) == 0:
        return number & (self.stages - 1)
    else:
        return number % self.stages


@gluon.jit
def parity(self, number):
    """Of how often its stage was filled before a tile."""
    if self.stages & (self.stages - 1) == 0:
        return (number & self.stages) // self.stages
    else:
        return (number // self.stages) & 1


@gluon.jit
def tile(self, number):
    """The memory of a tile."""
    return self.tiles.index(self.stage(number))


@gluon.jit
def arrival(self, number):
    """The barrier that a tile's copy completes."""
    return self.full.index(self.stage(number))


@gluon.jit
def wait_full(self, number, wanted=True):
    """Until a tile has arrived; not at all unless it is ``wanted``."""
    mbarrier.wait(self.arrival(number), self.parity(number), pred=wanted)


@aggregate
class Ring:
    """``stages`` tiles, each with a barrier that says it is full, and one that says it is empty.

    Tiles are numbered from 0 over all that a program loads; tile n lies in stage n % stages.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    # Not inherited: before Triton 3.8 an aggregate keeps no fields of a base class, since then it takes no plain base.
    stage, parity, tile, arrival, wait_full = stage, parity, tile, arrival, wait_full

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, stages):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def wait_released(self, number):
        """Until the ``number``-th release of all; not at all for one before the first."""
        mbarrier.wait(self.empty.index(self.stage(number)), self.parity(number), pred=number >= 0)

    @gluon.jit
    def wait_empty(self, number):
        """Until the tile that lay where this one will is released."""
        self.wait_released(number - self.stages)

    @gluon.jit
    def release(self, number):
        """Say that the calling warps read a tile no more."""
        mbarrier.arrive(self.empty.index(self.stage(number)), count=1)


@aggregate
class NamedRing:
    """A `Ring` whose tiles are released at `named` barriers, numbered from ``free``, by ``readers`` threads."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.constexpr
    readers: gl.constexpr
    stages: gl.constexpr

    stage, parity, tile, arrival, wait_full = stage, parity, tile, arrival, wait_full

    @gluon.constexpr_function
    def __init__(self, tiles, full, free, readers, stages):
        self.tiles = tiles
        self.full = full
        self.free = gl.constexpr(free)
        self.readers = gl.constexpr(readers)
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def wait_empty(self, number):
        """Until the tile that lay where this one will is released. One warp calls it, for each tile in turn."""
        if number >= self.stages:
            named.meet(self.free + self.stage(number), self.readers + named.WARP)

    @gluon.jit
    def wait_all(self, number):
        """Until all of so many tiles are released: a barrier that others came to alone is not to be left."""
        for late in range(max(number - self.stages, 0), number):
            named.meet(self.free + self.stage(late), self.readers + named.WARP)

    @gluon.jit
    def release(self, number):
        """Say that the calling warps read a tile no more."""
        named.arrive(self.free + self.stage(number), self.readers + named.WARP)


@gluon.jit
def new_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each stage, complete after so many arrivals.

    Each has to be waited for. Triton takes one that is not for dead after this, and puts tiles in its place; the GPU,
    which takes it for a barrier until the program ends, writes it there again when it turns to another process.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@gluon.jit
def new_tiles(descriptor, NUMBER: gl.constexpr):
    """Room for so many of the tiles that a descriptor copies."""
    shape: gl.constexpr = [NUMBER] + descriptor.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    return gl.allocate_shared_memory(descriptor.dtype, shape, descriptor.layout)
