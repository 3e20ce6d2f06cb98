"""FlashAttention backward with warps that have roles: one program for each tile of keys, dQ added up in global memory.

K and V of the tile stay in shared memory; tiles of q and dout, with numbers for each of their rows, come through rings.
Each of two warp groups owns 64 keys and computes with the transposed scores, so that the weights and their gradients
are left operands in registers for dV and dK. For dQ both groups' gradients have to meet in shared memory; each group
then computes half of dQ's columns, and a warp of its own adds them to a float32 buffer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .ring import Ring, new_barriers, new_tiles
from .schedule import Schedule
from .tiles import GROUP, as_matrix, store_rows
from .versions import aggregate, tma_add

NUMBERS = ("matrices", "heads", "group", "q_len", "k_len", "padded", "left", "right", "section")
"""Arguments that one compiled kernel takes any values of."""


@aggregate
class Memory:
    """What the warps share.

    k, v: the program's tile. q, dout, lse, delta: rings; lse comes with q and delta with dout. slopes: the gradients of
    scores, two tiles of (keys, rows of q), full when both groups have written theirs. dq: each group's columns of a
    tile.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q: Ring
    dout: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    slopes: Ring
    dq: Ring

    @gluon.constexpr_function
    def __init__(self, k, v, kv_full, q, dout, lse, delta, slopes, dq):
        self.k = k
        self.v = v
        self.kv_full = kv_full
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.slopes = slopes
        self.dq = dq


@gluon.jit
def copy_ahead(descriptors, memory, schedule, group, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr):
    """The copying warp: the tile of k and v, then all of q and dout that sees it, for each query head of the group."""
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    work = schedule.work(gl.program_id(0))
    corner = [work.batch, work.head, work.first_row, 0]
    mbarrier.expect(memory.kv_full, 2 * 2 * GROUP * HEAD_DIM * 2)
    tma.async_copy_global_to_shared(k_desc, corner, memory.kv_full, memory.k)
    tma.async_copy_global_to_shared(v_desc, corner, memory.kv_full, memory.v)
    number = 0
    for member in range(group):
        head = work.head * group + member
        matrix = work.matrix * group + member
        for tile in range(work.begin, work.end):
            corner = [work.batch, head, tile * TILE_Q, 0]
            stage = number % memory.q.stages
            memory.q.wait_empty(number)
            mbarrier.expect(memory.q.arrival(number), TILE_Q * HEAD_DIM * 2 + TILE_Q * 4)
            tma.async_copy_global_to_shared(q_desc, corner, memory.q.arrival(number), memory.q.tile(number))
            of_rows = [matrix, tile * TILE_Q]
            tma.async_copy_global_to_shared(lse_desc, of_rows, memory.q.arrival(number), memory.lse.index(stage))
            memory.dout.wait_empty(number)
            mbarrier.expect(memory.dout.arrival(number), TILE_Q * HEAD_DIM * 2 + TILE_Q * 4)
            tma.async_copy_global_to_shared(dout_desc, corner, memory.dout.arrival(number), memory.dout.tile(number))
            tma.async_copy_global_to_shared(delta_desc, of_rows, memory.dout.arrival(number), memory.delta.index(stage))
            number += 1


@gluon.jit
def add_up(dq_desc, memory, schedule, group, padded, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr):
    """The adding warp: tiles of dQ from shared memory to the buffer."""
    HALF: gl.constexpr = HEAD_DIM // 2
    work = schedule.work(gl.program_id(0))
    number = 0
    for member in range(group):
        matrix = work.matrix * group + member
        for tile in range(work.begin, work.end):
            row = matrix * padded + tile * TILE_Q
            memory.dq.wait_full(number)
            for half in gl.static_range(2):
                tma_add(dq_desc, [row, half * HALF], memory.dq.tiles.index(number % memory.dq.stages * 2 + half))
            tma.store_wait(0)
            memory.dq.release(number)
            number += 1


@gluon.jit
def visible(columns, rows, schedule):
    """Which pairs of columns and rows are seen.

    The forward's, with the roles exchanged, has bounds for each key where this has them for each row of q: in this loop
    those spill registers, and in the forward's these do.
    """
    seen = columns[:, None] >= 0
    if schedule.LEFT:
        seen = seen & (columns[:, None] <= (rows - schedule.left)[None, :])
    if schedule.RIGHT:
        seen = seen & (columns[:, None] >= (rows - schedule.right)[None, :])
    return seen


@gluon.jit
def compute(
    MEMBER: gl.constexpr, dk_ptr, dv_ptr, dk_strides, dv_strides, memory, schedule, group, scale, exponent_scale,
    HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """A computing warp group: dK and dV of its 64 keys, and its half of the columns of every tile of dQ."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    work = schedule.work(gl.program_id(0))
    k_tile = as_matrix(memory.k, 2 * GROUP, HEAD_DIM)
    k_own = k_tile.slice(MEMBER * GROUP, GROUP, dim=0)
    k_half = k_tile.slice(MEMBER * HALF, HALF, dim=1)
    v_own = as_matrix(memory.v, 2 * GROUP, HEAD_DIM).slice(MEMBER * GROUP, GROUP, dim=0)
    dk = gl.zeros([GROUP, HEAD_DIM], gl.float32, wide)
    dv = gl.zeros([GROUP, HEAD_DIM], gl.float32, wide)
    nothing = gl.zeros([GROUP, TILE_Q], gl.float32, layout)
    no_dq = gl.zeros([TILE_Q, HALF], gl.float32, half)
    first_column = work.first_row + MEMBER * GROUP
    columns = first_column + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
    within = gl.arange(0, TILE_Q, layout=gl.SliceLayout(0, layout))
    mbarrier.wait(memory.kv_full, 0)
    steps = work.end - work.begin
    for number in range(steps * group):
        tile = work.begin + number % steps
        stage = number % memory.q.stages
        q_tile = as_matrix(memory.q.tile(number), TILE_Q, HEAD_DIM)
        dout_tile = as_matrix(memory.dout.tile(number), TILE_Q, HEAD_DIM)
        memory.q.wait_full(number)
        scores = warpgroup_mma(k_own, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        memory.dout.wait_full(number)
        dweights = warpgroup_mma(v_own, dout_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, [scores])
        weights = gl.exp2(scores * exponent_scale - memory.lse.index(stage).load(layout))
        if schedule.LEFT or schedule.RIGHT:
            whole = (tile >= work.whole_begin) & (tile < work.whole_end)
            if not whole:
                weights = gl.where(visible(columns, tile * TILE_Q + within, schedule), weights, 0.0)
        operand_of_dv = gl.convert_layout(weights.to(dtype), operand)
        dv_pending = warpgroup_mma(operand_of_dv, dout_tile, dv, is_async=True)
        dweights = warpgroup_mma_wait(1, [dweights])
        slopes = (weights * (dweights - memory.delta.index(stage).load(layout))).to(dtype)
        slopes_tile = memory.slopes.tile(number)
        slopes_tile.slice(MEMBER * GROUP, GROUP, dim=0).store(slopes)
        fence_async_shared()
        mbarrier.arrive(memory.slopes.arrival(number), count=1)
        operand_of_dk = gl.convert_layout(slopes, operand)
        dk_pending = warpgroup_mma(operand_of_dk, q_tile, dk, is_async=True)
        dv, _ = warpgroup_mma_wait(1, [dv_pending, operand_of_dv])
        memory.dout.release(number)
        memory.slopes.wait_full(number)
        dq = warpgroup_mma(slopes_tile.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
        dk, _ = warpgroup_mma_wait(1, [dk_pending, operand_of_dk])
        memory.q.release(number)
        memory.dq.wait_empty(number)
        dq = warpgroup_mma_wait(0, [dq])
        memory.dq.tiles.index(number % memory.dq.stages * 2 + MEMBER).store(dq)
        fence_async_shared()
        mbarrier.arrive(memory.dq.arrival(number), count=1)
    dv_target = dv_ptr + work.batch.to(gl.int64) * dv_strides[0] + work.head.to(gl.int64) * dv_strides[1]
    dk_target = dk_ptr + work.batch.to(gl.int64) * dk_strides[0] + work.head.to(gl.int64) * dk_strides[1]
    store_rows(dv_target, dv_strides[2], v_own, dv.to(dtype), first_column, schedule.q_len)
    store_rows(dk_target, dk_strides[2], v_own, (dk * scale).to(dtype), first_column, schedule.q_len)


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dk,
    dv,
    dk_strides,
    dv_strides,
    matrices,
    heads,
    group,
    q_len,
    k_len,
    padded,
    left,
    right,
    section,
    scale,
    exponent_scale,
    HEAD_DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    STAGES: gl.constexpr,
    DQ_STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: a program for each tile of 128 keys of each matrix of k.

    ``matrices`` and ``heads`` are k's. lse, in exponents of 2, and delta are (matrices of q, padded), and dq is
    (matrices of q * padded, HEAD_DIM); ``padded`` is a multiple of TILE_Q, and lse is +inf beyond q_len.
    ``exponent_scale`` takes scores to exponents of 2.
    """
    # Of a key at column c the rows c - right to c - left see it: the same schedule with the roles exchanged.
    schedule = Schedule(matrices, heads, k_len, q_len, -right, -left, section, 2 * GROUP, TILE_Q, RIGHT, LEFT)
    dtype: gl.constexpr = q_desc.dtype
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * GROUP, TILE_Q], dtype)
    slopes = gl.allocate_shared_memory(dtype, [2, 2 * GROUP, TILE_Q], slopes_layout)
    memory = Memory(
        new_tiles(k_desc, 1).index(0), new_tiles(v_desc, 1).index(0), new_barriers(1, 1).index(0),
        Ring(new_tiles(q_desc, STAGES), new_barriers(STAGES, 1), new_barriers(STAGES, 2), STAGES),
        Ring(new_tiles(dout_desc, STAGES), new_barriers(STAGES, 1), new_barriers(STAGES, 2), STAGES),
        new_tiles(lse_desc, STAGES), new_tiles(delta_desc, STAGES),
        Ring(slopes, new_barriers(2, 2), new_barriers(2, 1), 2),
        Ring(new_tiles(dq_desc, 2 * DQ_STAGES), new_barriers(DQ_STAGES, 2), new_barriers(DQ_STAGES, 1), DQ_STAGES),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (compute, (
            0, dk, dv, dk_strides, dv_strides, memory, schedule, group, scale, exponent_scale, HEAD_DIM, TILE_Q,
        )),
        (compute, (
            1, dk, dv, dk_strides, dv_strides, memory, schedule, group, scale, exponent_scale, HEAD_DIM, TILE_Q,
        )),
        (copy_ahead, (
            (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), memory, schedule, group, HEAD_DIM, TILE_Q,
        )),
        (add_up, (dq_desc, memory, schedule, group, padded, HEAD_DIM, TILE_Q)),
    ], [4, 1, 1], [REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
