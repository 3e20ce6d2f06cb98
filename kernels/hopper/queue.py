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

    counter: a number in global memory that is 0 between launches: how many tiles were taken beyond the first of each
    program.
    """

    ring: Ring
    counter: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ring, counter):
        self.ring = ring
        self.counter = counter

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
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.ring.wait_empty(number)
        self.ring.tile(number).store(gl.full([1], 0, gl.int32, layout) + place)
        mbarrier.arrive(self.ring.arrival(number), count=1)

    @gluon.jit
    def hear(self, number):
        """Which tile is the ``number``-th, for a warp group that computes."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        self.ring.wait_full(number)
        place = gl.max(self.ring.tile(number).load(layout), 0)
        self.ring.release(number)
        return place


@gluon.jit
def new_queue(counter, READERS: gl.constexpr):
    """A queue that READERS partitions hear."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    places = gl.allocate_shared_memory(gl.int32, [STAGES, 1], shared)
    return Queue(Ring(places, new_barriers(STAGES, 1), new_barriers(STAGES, READERS), STAGES), counter)
