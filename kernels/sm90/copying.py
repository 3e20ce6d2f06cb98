"""What the warps of the forward share, and the one of them that copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..versions import aggregate, async_load
from .queue import CAREFUL, NONE, NORMAL, Queue, Verdicts, found, take
from .ring import Ring, new_barriers, new_tiles
from .tiles import GROUP

STEPS_AHEAD = gl.constexpr(2)
"""Tiles are taken so late, because who is slow should not take many, and no later, because it lasts a microsecond."""


@aggregate
class Memory:
    """What the warps share: a tile of q for each warp group, rings of k and v, room for the output, and places.

    q_more, k_more, v_more, out_more: the columns beyond the first tile's, if there are any: KEY_MORE of q and k,
    VALUE_MORE of v and the output. They come and go with the others.
    """

    q: Ring
    k: Ring
    v: Ring
    out: gl.shared_memory_descriptor
    queue: Queue
    verdicts: Verdicts
    q_more: gl.shared_memory_descriptor
    k_more: gl.shared_memory_descriptor
    v_more: gl.shared_memory_descriptor
    out_more: gl.shared_memory_descriptor
    KEY_MORE: gl.constexpr
    VALUE_MORE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, queue, verdicts, q_more, k_more, v_more, out_more, KEY_MORE, VALUE_MORE):
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.queue = queue
        self.verdicts = verdicts
        self.q_more = q_more
        self.k_more = k_more
        self.v_more = v_more
        self.out_more = out_more
        self.KEY_MORE = gl.constexpr(KEY_MORE)
        self.VALUE_MORE = gl.constexpr(VALUE_MORE)


@gluon.jit
def new_rings(q_desc, k_desc, v_desc, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """One of a tile of q for each warp group, and those of so many tiles of k and of v."""
    q_ring = Ring(new_tiles(q_desc, GROUPS), new_barriers(1, 1), new_barriers(1, GROUPS), 1)
    # A release is of the keys of one step and of the values of the step before.
    released = new_barriers(STAGES, GROUPS)
    k_ring = Ring(new_tiles(k_desc, STAGES), new_barriers(STAGES, 1), released, STAGES)
    v_ring = Ring(new_tiles(v_desc, STAGES), new_barriers(STAGES, 1), released, STAGES)
    return q_ring, k_ring, v_ring


@gluon.jit
def copy_ahead(
    descriptors, lse_ptr, counter, memory, schedule, group,
    HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The copying warp: what each tile needs, tile after tile, and at last again for those to be computed again."""
    tiles = schedule.tiles()
    number = 0
    turn = 0
    place = found(gl.program_id(0), counter, schedule, PERSISTENT)
    # Places of the last two tiles, which are not judged yet, and of the last one that is to be computed again. They
    # begin otherwise than `place`: a pass of the compiler takes what begins alike, and is handed on, for one number.
    last = -1
    last_but_one = -1
    again = -1
    while place < tiles:
        if turn > 1:
            again = noted(turn - 2, last_but_one, again, lse_ptr, memory.verdicts, schedule)
        number, following = copy_tile(
            descriptors, counter, memory, schedule, group, NORMAL, place, turn, number, HEAD_DIM, GROUPS, PERSISTENT
        )  # fmt: skip
        last_but_one = last
        last = place
        turn += 1
        place = following
    if turn > 1:
        again = noted(turn - 2, last_but_one, again, lse_ptr, memory.verdicts, schedule)
    computed = True
    if schedule.packing.PACKED:
        computed = turn > 0
    if computed:
        again = noted(turn - 1, last, again, lse_ptr, memory.verdicts, schedule)
    # Where sequences overlap, because numbers are out of order, the list is overwritten with anything.
    last_turn = 2 * turn
    while is_listed(again, turn, last_turn, schedule):
        place = again
        again = gl.load(link(lse_ptr, place, schedule))
        number, _ = copy_tile(
            descriptors, counter, memory, schedule, group, CAREFUL, place, turn, number, HEAD_DIM, GROUPS, False
        )  # fmt: skip
        turn += 1
    work, own = schedule.work(0)
    memory.queue.tell(turn, NONE, work, own)


@gluon.jit
def copy_tile(
    descriptors, counter, memory, schedule, group, kind, place, turn, number,
    HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, TAKE: gl.constexpr,
):  # fmt: skip
    """Tell of a tile, and copy its q, and k and v from the last tile of keys that a row sees to the first.

    TAKE: whether to take another tile, a few steps before the end. Its place is returned.
    """
    q_desc, k_desc, v_desc, q_more_desc, k_more_desc, v_more_desc = descriptors
    TILE_K: gl.constexpr = schedule.TILE_K
    KEY_BYTES: gl.constexpr = (HEAD_DIM + memory.KEY_MORE) * 2
    VALUE_BYTES: gl.constexpr = (HEAD_DIM + memory.VALUE_MORE) * 2
    work, own = schedule.work(place)
    memory.queue.tell(turn, kind, work, own)
    kv_head = work.head // group
    following = schedule.tiles()
    take_at = gl.minimum(work.begin + STEPS_AHEAD, work.end - 1)
    for tile in range(work.end - 1, work.begin - 1, -1):
        corner = own.k_corner(work.batch, kv_head, tile * TILE_K, 0)
        memory.k.wait_empty(number)
        beyond = own.k_corner(work.batch, kv_head, tile * TILE_K, HEAD_DIM)
        mbarrier.expect(memory.k.arrival(number), TILE_K * KEY_BYTES)
        async_load(k_desc, corner, memory.k.arrival(number), memory.k.tile(number))
        if memory.KEY_MORE > 0:
            room = memory.k_more.index(memory.k.stage(number))
            async_load(k_more_desc, beyond, memory.k.arrival(number), room)
        if tile == work.end - 1:
            # After the first keys, because room for those is free before room for q is.
            memory.q.wait_empty(turn)
            mbarrier.expect(memory.q.arrival(turn), GROUPS * GROUP * KEY_BYTES)
            for member in gl.static_range(GROUPS):
                async_load(
                    q_desc, own.q_corner(work.batch, work.head, work.first_row + member * GROUP, 0),
                    memory.q.arrival(turn), memory.q.tiles.index(member),
                )  # fmt: skip
                if memory.KEY_MORE > 0:
                    async_load(
                        q_more_desc, own.q_corner(work.batch, work.head, work.first_row + member * GROUP, HEAD_DIM),
                        memory.q.arrival(turn), memory.q_more.index(member),
                    )  # fmt: skip
        if TAKE:  # noqa: SIM102 - known when compiled
            if tile == take_at:
                following = found(take(counter, following), counter, schedule, True)
        memory.v.wait_empty(number + 1)
        mbarrier.expect(memory.v.arrival(number), TILE_K * VALUE_BYTES)
        async_load(v_desc, corner, memory.v.arrival(number), memory.v.tile(number))
        if memory.VALUE_MORE > 0:
            room = memory.v_more.index(memory.v.stage(number))
            async_load(v_more_desc, beyond, memory.v.arrival(number), room)
        number += 1
    return number, following


@gluon.jit
def noted(turn, place, again, lse_ptr, verdicts, schedule):
    """The head of the list of tiles to be computed again, after the verdict on one more."""
    if verdicts.verdict(turn):
        gl.store(link(lse_ptr, place, schedule), again)
        again = place
    return again


@gluon.jit
def is_listed(again, turn, last_turn, schedule):
    """Whether a place is one, and not the end of the list."""
    listed = again >= 0
    if schedule.packing.PACKED:
        listed = listed & (again < schedule.tiles()) & (turn < last_turn)
    return listed


@gluon.jit
def link(lse_ptr, place, schedule):
    """Where a listed tile keeps the place of the one before it: in a log-sum-exp that will be written again."""
    work, own = schedule.work(place)
    return (schedule.row_numbers(lse_ptr, work, own) + work.first_row).to(gl.pointer_type(gl.int32))
