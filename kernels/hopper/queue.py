"""How programs share tiles: each takes the next that none has taken, so that those that are faster take more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .ring import Ring, new_barriers
from .versions import aggregate

STAGES = gl.constexpr(2)
FIELDS = gl.constexpr(4)
FIELDS_OF_SEQUENCE = gl.constexpr(3)

NORMAL, CAREFUL, NONE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What is to be done with a tile that is told: compute it, compute it again, or stop, because there is none."""


@aggregate
class Queue:
    """The tiles of this program, as the copying warp tells them to those that compute, four numbers each, or seven.

    And what these say of each: whether it has to be computed again. verdicts: two numbers in turn for each of them.
    PACKED: whether three numbers are told of a tile's sequence.
    counter: a number in global memory that is 0 between launches: how many tiles were taken beyond the first of each
    program.
    """

    ring: Ring
    verdicts: Ring
    counter: gl.tensor
    READERS: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, verdicts, counter, READERS, PACKED):
        self.ring = ring
        self.verdicts = verdicts
        self.counter = counter
        self.READERS = gl.constexpr(READERS)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def take(self, tiles):
        """The next tile's place; ``tiles`` or more if there is none left."""
        taken = gl.atomic_add(self.counter, 1, sem="relaxed")
        if taken == tiles - 1:
            # Each program takes one that is not there, so this is the last of all that are ever taken.
            gl.store(self.counter, 0)
        return taken + gl.num_programs(0)

    @gluon.jit
    def tell(self, number, kind, work, own):
        """Let those that compute know what to do in their ``number``-th turn, and where."""
        self.ring.wait_empty(number)
        first = number % STAGES * FIELDS
        write(self.ring.tiles.index(first), kind, 1)
        write(self.ring.tiles.index(first + 1), work.batch, 1)
        write(self.ring.tiles.index(first + 2), work.head, 1)
        write(self.ring.tiles.index(first + 3), work.first_row, 1)
        if self.PACKED:
            first = number % STAGES * FIELDS_OF_SEQUENCE + STAGES * FIELDS
            write(self.ring.tiles.index(first), own.packing.q_start, 1)
            write(self.ring.tiles.index(first + 1), own.q_len, 1)
            write(self.ring.tiles.index(first + 2), own.k_len, 1)
        mbarrier.arrive(self.ring.arrival(number), count=1)

    @gluon.jit
    def hear(self, number):
        """What to do in the ``number``-th turn, for a warp group that computes; batch, head and first row."""
        self.ring.wait_full(number)
        first = number % STAGES * FIELDS
        kind = read(self.ring.tiles.index(first), 4)
        batch = read(self.ring.tiles.index(first + 1), 4)
        head = read(self.ring.tiles.index(first + 2), 4)
        first_row = read(self.ring.tiles.index(first + 3), 4)
        if not self.PACKED:
            self.ring.release(number)
        return kind, batch, head, first_row

    @gluon.jit
    def sequence(self, number, schedule):
        """After that, for a tile: the schedule of its sequence."""
        own = schedule
        if self.PACKED:
            first = number % STAGES * FIELDS_OF_SEQUENCE + STAGES * FIELDS
            q_start = read(self.ring.tiles.index(first), 4)
            q_len = read(self.ring.tiles.index(first + 1), 4)
            k_len = read(self.ring.tiles.index(first + 2), 4)
            self.ring.release(number)
            # Who computes writes to rows of q alone.
            own = schedule.of_sequence(schedule.packing.of(q_start, q_start, q_start), q_len, k_len)
        return own

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
def new_queue(counter, READERS: gl.constexpr, PACKED: gl.constexpr):
    """A queue that READERS partitions hear."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUMBERS: gl.constexpr = FIELDS + FIELDS_OF_SEQUENCE if PACKED else FIELDS
    places = gl.allocate_shared_memory(gl.int32, [STAGES * NUMBERS, 1], shared)
    verdicts = gl.allocate_shared_memory(gl.int32, [STAGES * READERS, 1], shared)
    judged = new_barriers(STAGES, READERS)
    ring = Ring(places, new_barriers(STAGES, 1), new_barriers(STAGES, READERS), STAGES)
    return Queue(ring, Ring(verdicts, judged, judged, STAGES), counter, READERS, PACKED)


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
