"""How programs share tiles: each takes the next that none has taken, so that those that are faster take more."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..versions import aggregate
from .ring import Ring, new_barriers

STAGES = gl.constexpr(2)
FIELDS = gl.constexpr(4)
FIELDS_OF_SEQUENCE = gl.constexpr(5)

NORMAL, CAREFUL, NONE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""What is to be done with a tile that is told: compute it, compute it again, or stop, because there is none."""


@aggregate
class Queue:
    """The tiles of this program, as the copying warp tells them to the others, four numbers each, or nine.

    PACKED: whether five numbers are told of a tile's sequence.
    """

    ring: Ring
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, PACKED):
        self.ring = ring
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def tell(self, number, kind, work, own):
        """Let the others know what to do in their ``number``-th turn, and where."""
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
            write(self.ring.tiles.index(first + 3), own.packing.k_start, 1)
            write(self.ring.tiles.index(first + 4), own.packing.number, 1)
        mbarrier.arrive(self.ring.arrival(number), count=1)

    @gluon.jit
    def hear(self, number, WARPS: gl.constexpr):
        """What to do in the ``number``-th turn, for a role of so many warps; batch, head and first row."""
        self.ring.wait_full(number)
        first = number % STAGES * FIELDS
        kind = read(self.ring.tiles.index(first), WARPS)
        batch = read(self.ring.tiles.index(first + 1), WARPS)
        head = read(self.ring.tiles.index(first + 2), WARPS)
        first_row = read(self.ring.tiles.index(first + 3), WARPS)
        if not self.PACKED:
            self.ring.release(number)
        return kind, batch, head, first_row

    @gluon.jit
    def sequence(self, number, schedule, WARPS: gl.constexpr):
        """After that, for a tile: the schedule of its sequence."""
        own = schedule
        if self.PACKED:
            first = number % STAGES * FIELDS_OF_SEQUENCE + STAGES * FIELDS
            q_start = read(self.ring.tiles.index(first), WARPS)
            q_len = read(self.ring.tiles.index(first + 1), WARPS)
            k_len = read(self.ring.tiles.index(first + 2), WARPS)
            k_start = read(self.ring.tiles.index(first + 3), WARPS)
            of_starts = read(self.ring.tiles.index(first + 4), WARPS)
            self.ring.release(number)
            own = schedule.of_sequence(schedule.packing.of(of_starts, q_start, k_start), q_len, k_len)
        return own


@aggregate
class Verdicts:
    """What those that compute say of each tile: whether it has to be computed again. Two in turn for each of them."""

    ring: Ring
    READERS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ring, READERS):
        self.ring = ring
        self.READERS = gl.constexpr(READERS)

    @gluon.jit
    def judge(self, number, MEMBER: gl.constexpr, again):
        """Say, for one of the warp groups, whether the ``number``-th tile has to be computed again."""
        write(self.ring.tiles.index(number % STAGES * self.READERS + MEMBER), again, 4)
        mbarrier.arrive(self.ring.arrival(number), count=1)

    @gluon.jit
    def verdict(self, number):
        """Whether any has said so; asked before the tile after the next is begun, because then there is a new one."""
        self.ring.wait_full(number)
        again = 0
        for member in gl.static_range(self.READERS):
            again |= read(self.ring.tiles.index(number % STAGES * self.READERS + member), 1)
        return again != 0


@gluon.jit
def take(counter, tiles):
    """The next tile's place; ``tiles`` or more if there is none left.

    counter: a number in global memory that is 0 between launches: how many tiles were taken beyond the first of each
    program.
    """
    taken = gl.atomic_add(counter, 1, sem="relaxed")
    if taken == tiles - 1:
        # Each program takes one that is not there, so this is the last of all that are ever taken.
        gl.store(counter, 0)
    return taken + gl.num_programs(0)


@gluon.jit
def found(place, counter, schedule, TAKE: gl.constexpr):
    """The first place from here on with a tile, if more are taken; else none if this has none."""
    if schedule.packing.PACKED:
        while schedule.is_spare(place):
            if TAKE:
                place = take(counter, schedule.tiles())
            else:
                place = schedule.tiles()
    return place


@gluon.jit
def new_queue(READERS: gl.constexpr, PACKED: gl.constexpr):
    """A queue that so many roles hear."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NUMBERS: gl.constexpr = FIELDS + FIELDS_OF_SEQUENCE if PACKED else FIELDS
    places = gl.allocate_shared_memory(gl.int32, [STAGES * NUMBERS, 1], shared)
    return Queue(Ring(places, new_barriers(STAGES, 1), new_barriers(STAGES, READERS), STAGES), PACKED)


@gluon.jit
def new_verdicts(READERS: gl.constexpr):
    """Of so many warp groups."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    verdicts = gl.allocate_shared_memory(gl.int32, [STAGES * READERS, 1], shared)
    judged = new_barriers(STAGES, READERS)
    return Verdicts(Ring(verdicts, judged, judged, STAGES), READERS)


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
