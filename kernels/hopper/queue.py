"""How programs share tiles: each takes the next that none has taken, so that those that are faster take more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .ring import Ring, new_barriers
from .versions import aggregate

STAGES = gl.constexpr(2)


@aggregate
class Queue:
    """The places of this program's tiles in the order of all, as the copying warp tells them to those that compute.

    And what these say of each: whether it has to be computed again. verdicts: two numbers in turn for each of them.
    counter: a number in global memory that is 0 between launches: how many tiles were taken beyond the first of each
    program.
    """

    ring: Ring
    verdicts: Ring
    counter: gl.tensor
    READERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, verdicts, counter, READERS):
        self.ring = ring
        self.verdicts = verdicts
        self.counter = counter
        self.READERS = gl.constexpr(READERS)

    @gluon.jit
    def take(self, tiles):
        """The next tile's place; ``tiles`` or more if there is none left."""
        taken = gl.atomic_add(self.counter, 1)
        if taken == tiles - 1:
            # Each program takes one that is not there, so this is the last of all that are ever taken.
            gl.store(self.counter, 0)
        return taken + gl.num_programs(0)

    @gluon.jit
    def tell(self, number, place):
        """Let those that compute know which tile is their ``number``-th."""
        self.ring.wait_empty(number)
        write(self.ring.tile(number), place, 1)
        mbarrier.arrive(self.ring.arrival(number), count=1)

    @gluon.jit
    def hear(self, number):
        """Which tile is the ``number``-th, for a warp group that computes."""
        self.ring.wait_full(number)
        place = read(self.ring.tile(number), 4)
        self.ring.release(number)
        return place

    @gluon.jit
    def judge(self, number, MEMBER: gl.constexpr, again):
        """Say, for one of the warp groups, whether the ``number``-th tile has to be computed again."""
        write(self.verdicts.tiles.index(number % STAGES * self.READERS + MEMBER), again, 4)
        mbarrier.arrive(self.verdicts.arrival(number), count=1)

    @gluon.jit
    def verdict(self, number):
        """Whether any has said so; asked before the tile after the next is begun, because then there is a new one."""
        self.verdicts.wait_full(number)
        again = 0
        for member in gl.static_range(self.READERS):
            again |= read(self.verdicts.tiles.index(number % STAGES * self.READERS + member), 1)
        return again != 0


@gluon.jit
def new_queue(counter, READERS: gl.constexpr):
    """A queue that READERS partitions hear."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], shared)
    verdicts = gl.allocate_shared_memory(gl.int32, [STAGES * READERS, 1], shared)
    judged = new_barriers(STAGES, READERS)
    ring = Ring(places, new_barriers(STAGES, 1), new_barriers(STAGES, READERS), STAGES)
    return Queue(ring, Ring(verdicts, judged, judged, STAGES), counter, READERS)


@gluon.jit
def write(memory, number, WARPS: gl.constexpr):
    """Put a number where there is room for one."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    memory.store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def read(memory, WARPS: gl.constexpr):
    """The number that is there."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(memory.load(layout), 0)
