"""What the warps of the backward share, and the one of them that copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .ring import Ring
from .tiles import GROUP
from .versions import aggregate


@aggregate
class Memory:
    """What the warps share.

    k, v: the program's tile, that of v in one piece for each warp group. q, dout, lse, delta: rings; lse comes with q
    and delta with dout. slopes: the gradients of scores, two tiles of (keys, rows of q), full when all groups have
    written theirs. weights: two such tiles, where groups share keys.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q: Ring
    dout: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    slopes: Ring
    weights: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, kv_full, q, dout, lse, delta, slopes, weights):
        self.k = k
        self.v = v
        self.kv_full = kv_full
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.slopes = slopes
        self.weights = weights


@gluon.jit
def copy_ahead(descriptors, memory, schedule, group, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr):
    """The copying warp: the tile of k and v, then all of q and dout that sees it, for each query head of the group."""
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    work, own = schedule.work(gl.program_id(0))
    corner = own.q_corner(work.batch, work.head, work.first_row, 0)
    KEYS: gl.constexpr = schedule.TILE_Q
    mbarrier.expect(memory.kv_full, 2 * KEYS * HEAD_DIM * 2)
    tma.async_copy_global_to_shared(k_desc, corner, memory.kv_full, memory.k)
    for member in gl.static_range(KEYS // GROUP):
        corner = own.q_corner(work.batch, work.head, work.first_row + member * GROUP, 0)
        tma.async_copy_global_to_shared(v_desc, corner, memory.kv_full, memory.v.index(member))
    number = 0
    for member in range(own.visits(group)):
        head = work.head * group + member
        matrix = work.matrix * group + member
        for tile in range(work.begin, work.end):
            corner = own.k_corner(work.batch, head, tile * TILE_Q, 0)
            stage = number % memory.q.stages
            memory.q.wait_empty(number)
            mbarrier.expect(memory.q.arrival(number), TILE_Q * HEAD_DIM * 2 + TILE_Q * 4)
            tma.async_copy_global_to_shared(q_desc, corner, memory.q.arrival(number), memory.q.tile(number))
            of_rows = [matrix, own.first_filled_up() + tile * TILE_Q]
            tma.async_copy_global_to_shared(lse_desc, of_rows, memory.q.arrival(number), memory.lse.index(stage))
            mbarrier.expect(memory.dout.arrival(number), TILE_Q * HEAD_DIM * 2 + TILE_Q * 4)
            tma.async_copy_global_to_shared(dout_desc, corner, memory.dout.arrival(number), memory.dout.tile(number))
            tma.async_copy_global_to_shared(delta_desc, of_rows, memory.dout.arrival(number), memory.delta.index(stage))
            number += 1
