"""What the warps of the backward share, and those of them that copy."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..versions import aggregate, async_atomic_add, async_load
from . import named
from .copying import STEPS_AHEAD
from .queue import NONE, NORMAL, Queue, found, take
from .ring import NamedRing
from .tiles import GROUP


@aggregate
class Memory:
    """What the warps share.

    queue: of the tiles of keys that the program computes, one after the other.
    k, v: such a tile, that of v in one piece for each warp group; k comes with the tile's first q, v with its first
    dout. k_read, v_read: barriers that say that they are read no more, and that v's room is not needed for gradients.
    over: a barrier that nobody comes to, whose last phase is over, if steps wait for it; else another.
    q, dout, lse, delta: rings; lse comes with q and delta with dout. slopes: the gradients of scores, two tiles of
    (keys, rows of q). more: two such tiles of weights, where groups share keys; else room for each group's part of a
    tile of dQ.
    """

    queue: Queue
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_read: gl.shared_memory_descriptor
    v_read: gl.shared_memory_descriptor
    over: gl.shared_memory_descriptor
    q: NamedRing
    dout: NamedRing
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    slopes: gl.shared_memory_descriptor
    more: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, queue, k, v, k_read, v_read, over, q, dout, lse, delta, slopes, more):
        self.queue = queue
        self.k = k
        self.v = v
        self.k_read = k_read
        self.v_read = v_read
        self.over = over
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.slopes = slopes
        self.more = more


@gluon.jit
def copy_ahead(
    descriptors, counter, memory, schedule, group,
    HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr, PERSISTENT: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The copying warp: what each tile of keys needs, tile after tile."""
    tiles = schedule.tiles()
    number = 0
    turn = 0
    place = found(gl.program_id(0), counter, schedule, PERSISTENT)
    while place < tiles:
        number, place = copy_tile(
            descriptors, counter, memory, schedule, group, place, turn, number, HEAD_DIM, TILE_Q, PERSISTENT, TURNED
        )
        turn += 1
    work, own = schedule.work(0)
    memory.queue.tell(turn, NONE, work, own)
    memory.q.wait_all(number)
    memory.dout.wait_all(number)


@gluon.jit
def copy_tile(
    descriptors, counter, memory, schedule, group, place, turn, number,
    HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr, TAKE: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """Tell of a tile of k and v, and copy it, and all of q and dout that sees it, for each query head of the group.

    TAKE: whether to take another tile, a few steps before the end. Its place is returned, with how many tiles of q were
    copied by then.
    """
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    work, own = schedule.work(place)
    visits = own.visits(group)
    if schedule.packing.PACKED:  # noqa: SIM102 - known when compiled
        if visits == 0:
            # Nothing is copied that those who compute would wait for. Told before, they could be two turns ahead of
            # the waits below, which tell even turns from odd ones alone.
            mbarrier.wait(memory.k_read, (turn - 1) & 1, pred=turn > 0)
            mbarrier.wait(memory.v_read, (turn - 1) & 1, pred=turn > 0)
    memory.queue.tell(turn, NORMAL, work, own)
    KEYS: gl.constexpr = schedule.TILE_Q
    BYTES: gl.constexpr = TILE_Q * HEAD_DIM * 2 + TILE_Q * 4
    following = schedule.tiles()
    first = number
    take_at = number + gl.maximum(visits * (work.end - work.begin) - 1 - STEPS_AHEAD, 0)
    for member in range(visits):
        head = work.head * group + member
        matrix = work.matrix * group + member
        for tile in range(work.begin, work.end):
            row = own.in_place_of(tile, work, TURNED) * TILE_Q
            corner = own.k_corner(work.batch, head, row, 0)
            of_rows = [matrix, own.first_filled_up() + row]
            stage = memory.q.stage(number)
            memory.q.wait_empty(number)
            arrival = memory.q.arrival(number)
            mbarrier.expect(arrival, BYTES + KEYS * HEAD_DIM * 2, pred=number == first)
            mbarrier.expect(arrival, BYTES, pred=number > first)
            async_load(q_desc, corner, arrival, memory.q.tile(number))
            async_load(lse_desc, of_rows, arrival, memory.lse.index(stage))
            if number == first:
                mbarrier.wait(memory.k_read, (turn - 1) & 1, pred=turn > 0)
                corner_of_k = own.q_corner(work.batch, work.head, work.first_row, 0)
                async_load(k_desc, corner_of_k, arrival, memory.k.index(0))
            memory.dout.wait_empty(number)
            arrival = memory.dout.arrival(number)
            mbarrier.expect(arrival, BYTES + KEYS * HEAD_DIM * 2, pred=number == first)
            mbarrier.expect(arrival, BYTES, pred=number > first)
            async_load(dout_desc, corner, arrival, memory.dout.tile(number))
            async_load(delta_desc, of_rows, arrival, memory.delta.index(stage))
            if number == first:
                mbarrier.wait(memory.v_read, (turn - 1) & 1, pred=turn > 0)
                for part in gl.static_range(KEYS // GROUP):
                    corner_of_v = own.q_corner(work.batch, work.head, work.first_row + part * GROUP, 0)
                    async_load(v_desc, corner_of_v, arrival, memory.v.index(part))
            if TAKE:  # noqa: SIM102 - known when compiled
                if number == take_at:
                    following = found(take(counter, following), counter, schedule, True)
            number += 1
    if TAKE and schedule.packing.PACKED:  # noqa: SIM102
        if number == first:
            following = found(take(counter, following), counter, schedule, True)
    return number, following


NUMBERS_A_ROW = gl.constexpr(32)
"""Of the rows that dQ is described to the copying unit with: 128 bytes."""


@gluon.jit
def add_up(
    dq_desc, added, memory, schedule, group, padded,
    HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr, IN_ORDER: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The adding warp: what the groups have put into shared memory of every tile of dQ, to the sums in global memory.

    So no computing warp has its reads of shared memory wait behind additions that are on their way. IN_ORDER: each
    waits until all have added whose tile of keys was taken before, so that sums are the same on every run.
    """
    TILE: gl.constexpr = TILE_Q * HEAD_DIM // NUMBERS_A_ROW
    THREADS: gl.constexpr = named.GROUP + named.WARP
    turn = 0
    kind, batch, head, first_row = memory.queue.hear(turn, 1)
    while kind != NONE:
        own = memory.queue.sequence(turn, schedule, 1)
        work = own.work_of(batch, head, first_row)
        for member in range(own.visits(group)):
            rows = (work.matrix * group + member) * padded + own.first_filled_up()
            first = rows * (HEAD_DIM // NUMBERS_A_ROW)
            number = work.first_row // schedule.TILE_Q
            following = number + 1
            for tile in range(work.begin, work.end):
                for part in gl.static_range(2):
                    # The addition of the other part may go on.
                    tma.store_wait(1 - part)
                    named.arrive(named.TAKEN + part, THREADS)
                if IN_ORDER:
                    before = number
                    if schedule.RIGHT:
                        # Those with higher numbers were taken before; as many of them as see this tile.
                        while own.sees(following, tile, work):
                            following += 1
                        before = following - 1 - number
                    place = added + (rows // GROUP + tile * (TILE_Q // GROUP))
                    wait_for(place, before)
                for part in gl.static_range(2):
                    named.meet(named.FULL + part, THREADS)
                    visited = own.in_place_of(tile, work, TURNED)
                    async_atomic_add(dq_desc, [first + visited * TILE + part * (TILE // 2), 0], memory.more.index(part))
                if IN_ORDER:
                    finish_additions(turn)
                    gl.atomic_add(place, 1, sem="release")
        turn += 1
        kind, batch, head, first_row = memory.queue.hear(turn, 1)
    tma.store_wait(0)


@gluon.jit
def wait_for(place, number):
    """Until there is a number in global memory."""
    found_there = gl.atomic_add(place, 0, sem="acquire")
    while found_there != number:
        found_there = gl.atomic_add(place, 0, sem="acquire")


@gluon.jit
def finish_additions(any):
    """Wait until the copying unit's additions, as Triton only asks whether it has read what it adds, can be seen."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r", [any], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
