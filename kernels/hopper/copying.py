"""What the warps of the forward share, and the one of them that copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .queue import Queue
from .ring import Ring
from .tiles import GROUP
from .versions import aggregate


@aggregate
class Memory:
    """What the warps share: a tile of q for each warp group, rings of k and v, room for the output, and places."""

    q: Ring
    k: Ring
    v: Ring
    out: gl.shared_memory_descriptor
    queue: Queue

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, queue):
        self.q = q
        self.k = k
        self.v = v
        self.out = out
        self.queue = queue


@gluon.jit
def copy_ahead(
    q_desc, k_desc, v_desc, lse_ptr, memory, schedule, group,
    HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """The copying warp: what each tile needs, tile after tile, and at last again for those to be computed again."""
    tiles = schedule.tiles()
    number = 0
    turn = 0
    place = gl.program_id(0)
    # Places of the last two tiles, which are not judged yet, and of the last one that is to be computed again.
    last = place
    last_but_one = place
    again = -1
    while place < tiles:
        if turn > 1:
            again = noted(turn - 2, last_but_one, again, lse_ptr, memory.queue, schedule)
        following = tiles
        if PERSISTENT:
            following = memory.queue.take(tiles)
            if following < tiles:
                memory.queue.tell(turn, following)
        number = copy_tile(q_desc, k_desc, v_desc, memory, schedule, group, place, turn, number, HEAD_DIM, GROUPS)
        last_but_one = last
        last = place
        turn += 1
        place = following
    if turn > 1:
        again = noted(turn - 2, last_but_one, again, lse_ptr, memory.queue, schedule)
    again = noted(turn - 1, last, again, lse_ptr, memory.queue, schedule)
    while again >= 0:
        place = again
        again = gl.load(link(lse_ptr, place, schedule))
        memory.queue.tell(turn - 1, place - tiles)
        number = copy_tile(q_desc, k_desc, v_desc, memory, schedule, group, place, turn, number, HEAD_DIM, GROUPS)
        turn += 1
    memory.queue.tell(turn - 1, tiles)


@gluon.jit
def copy_tile(
    q_desc, k_desc, v_desc, memory, schedule, group, place, turn, number,
    HEAD_DIM: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Copy a tile of q, and those of k and v from the last one that a row sees to the first."""
    TILE_K: gl.constexpr = schedule.TILE_K
    work = schedule.work(place)
    kv_head = work.head // group
    memory.q.wait_empty(turn)
    mbarrier.expect(memory.q.arrival(turn), GROUPS * GROUP * HEAD_DIM * 2)
    for member in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(
            q_desc, [work.batch, work.head, work.first_row + member * GROUP, 0],
            memory.q.arrival(turn), memory.q.tiles.index(member),
        )  # fmt: skip
    for step in range(work.end - work.begin):
        corner = [work.batch, kv_head, (work.end - 1 - step) * TILE_K, 0]
        memory.k.wait_empty(number)
        mbarrier.expect(memory.k.arrival(number), TILE_K * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(k_desc, corner, memory.k.arrival(number), memory.k.tile(number))
        memory.v.wait_empty(number + 1)
        mbarrier.expect(memory.v.arrival(number), TILE_K * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(v_desc, corner, memory.v.arrival(number), memory.v.tile(number))
        number += 1
    return number


@gluon.jit
def noted(turn, place, again, lse_ptr, queue, schedule):
    """The head of the list of tiles to be computed again, after the verdict on one more."""
    if queue.verdict(turn):
        gl.store(link(lse_ptr, place, schedule), again)
        again = place
    return again


@gluon.jit
def link(lse_ptr, place, schedule):
    """Where a listed tile keeps the place of the one before it: in a log-sum-exp that will be written again."""
    work = schedule.work(place)
    return (lse_ptr + work.matrix.to(gl.int64) * schedule.q_len + work.first_row).to(gl.pointer_type(gl.int32))
