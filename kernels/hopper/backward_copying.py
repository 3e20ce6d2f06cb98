"""What the warps of the backward share, and those of them that copy."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import named
from .ring import NamedRing
from .tiles import GROUP
from .versions import aggregate, tma_add


@aggregate
class Memory:
    """What the warps share.

    k, v: the program's tile, that of v in one piece for each warp group; k comes with the first q, v with the first
    dout. q, dout, lse, delta: rings; lse comes with q and delta with dout. slopes: the gradients of scores, two tiles
    of (keys, rows of q). more: two such tiles of weights, where groups share keys; else room for each group's part of
    a tile of dQ.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: NamedRing
    dout: NamedRing
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    slopes: gl.shared_memory_descriptor
    more: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, q, dout, lse, delta, slopes, more):
        self.k = k
        self.v = v
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.slopes = slopes
        self.more = more


@gluon.jit
def copy_ahead(descriptors, memory, schedule, group, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr):
    """The copying warp: the tile of k and v, then all of q and dout that sees it, for each query head of the group."""
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    work, own = schedule.work(gl.program_id(0))
    KEYS: gl.constexpr = schedule.TILE_Q
    BYTES: gl.constexpr = TILE_Q * HEAD_DIM * 2 + TILE_Q * 4
    number = 0
    for member in range(own.visits(group)):
        head = work.head * group + member
        matrix = work.matrix * group + member
        for tile in range(work.begin, work.end):
            corner = own.k_corner(work.batch, head, tile * TILE_Q, 0)
            of_rows = [matrix, own.first_filled_up() + tile * TILE_Q]
            stage = number % memory.q.stages
            memory.q.wait_empty(number)
            arrival = memory.q.arrival(number)
            if number == 0:
                mbarrier.expect(arrival, BYTES + KEYS * HEAD_DIM * 2)
                corner_of_k = own.q_corner(work.batch, work.head, work.first_row, 0)
                tma.async_copy_global_to_shared(k_desc, corner_of_k, arrival, memory.k)
            else:
                mbarrier.expect(arrival, BYTES)
            tma.async_copy_global_to_shared(q_desc, corner, arrival, memory.q.tile(number))
            tma.async_copy_global_to_shared(lse_desc, of_rows, arrival, memory.lse.index(stage))
            memory.dout.wait_empty(number)
            arrival = memory.dout.arrival(number)
            if number == 0:
                mbarrier.expect(arrival, BYTES + KEYS * HEAD_DIM * 2)
                for part in gl.static_range(KEYS // GROUP):
                    corner_of_v = own.q_corner(work.batch, work.head, work.first_row + part * GROUP, 0)
                    tma.async_copy_global_to_shared(v_desc, corner_of_v, arrival, memory.v.index(part))
            else:
                mbarrier.expect(arrival, BYTES)
            tma.async_copy_global_to_shared(dout_desc, corner, arrival, memory.dout.tile(number))
            tma.async_copy_global_to_shared(delta_desc, of_rows, arrival, memory.delta.index(stage))
            number += 1
    memory.q.wait_all(number)
    memory.dout.wait_all(number)


NUMBERS_A_ROW = gl.constexpr(32)
"""Of the rows that dQ is described to the copying unit with: 128 bytes."""


@gluon.jit
def add_up(
    dq_desc, memory, schedule, group, padded, GROUPS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr
):
    """The adding warp: what the groups have put into shared memory of every tile of dQ, to the sums in global memory.

    So no computing warp has its reads of shared memory wait behind additions that are on their way.
    """
    work, own = schedule.work(gl.program_id(0))
    TILE: gl.constexpr = TILE_Q * HEAD_DIM // NUMBERS_A_ROW
    THREADS: gl.constexpr = named.GROUP + named.WARP
    number = 0
    for member in range(own.visits(group)):
        rows = (work.matrix * group + member) * padded + own.first_filled_up()
        first = rows * (HEAD_DIM // NUMBERS_A_ROW)
        for tile in range(work.begin, work.end):
            for part in gl.static_range(GROUPS):
                if number > 0:
                    # The additions of the other parts may go on.
                    tma.store_wait(GROUPS - 1 - part)
                named.arrive(named.TAKEN + part, THREADS)
            for part in gl.static_range(GROUPS):
                named.meet(named.FULL + part, THREADS)
                tma_add(dq_desc, [first + tile * TILE + part * (TILE // GROUPS), 0], memory.more.index(part))
            number += 1
    tma.store_wait(0)
