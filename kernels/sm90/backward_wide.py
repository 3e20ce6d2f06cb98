"""FlashAttention backward for heads of 256: as `backward`, but one program has 64 keys, and its warp groups share them.

The gradients of 64 keys fill the registers of two groups, each of which has half of the columns. Scores and what
follows from them are needed by both: each computes them for half of the rows of q, and both meet in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import named
from .backward import NUMBERS, over_tiles, room_in, store_gradients
from .backward_copying import Memory, copy_ahead
from .backward_step import visible, weights_of, zero_of_a_step
from .packing import new_packing
from .queue import NONE, new_queue
from .ring import NamedRing, new_barriers, new_tiles
from .schedule import Schedule
from .softmax import Exponents
from .tiles import GROUP, add, as_matrix

ROWS = gl.constexpr(GROUP.value // 2)
"""Rows of q whose scores a group computes."""


@gluon.jit
def step(
    dk, dv, memory, schedule, columns, number, tile, sums, exponents,
    MASKED: gl.constexpr, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """What one tile of q and dout adds to this group's columns of dK, dV and dQ."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    stage = memory.q.stage(number)
    nothing = gl.zeros([GROUP, ROWS], gl.float32, layout)
    zero = zero_of_a_step(number)
    k_tile = as_matrix(memory.k.index(zero), GROUP, HEAD_DIM)
    v_tile = as_matrix(memory.v.index(zero), GROUP, HEAD_DIM)
    q_tile = as_matrix(memory.q.tile(number), GROUP, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.tile(number), GROUP, HEAD_DIM)
    memory.q.wait_full(number)
    q_own = q_tile.slice(MEMBER * ROWS, ROWS, dim=0)
    scores = warpgroup_mma(k_tile, q_own.permute((1, 0)), nothing, use_acc=False, is_async=True)
    lse = memory.lse.index(stage).slice(MEMBER * ROWS, ROWS, dim=1).load(layout)
    memory.dout.wait_full(number)
    dout_own = dout_tile.slice(MEMBER * ROWS, ROWS, dim=0)
    dweights = warpgroup_mma(v_tile, dout_own.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = exponents.cap(warpgroup_mma_wait(1, [scores]))
    weights = weights_of(scores * exponents.scale - lse)
    if MASKED:
        first_row = tile * GROUP + MEMBER * ROWS
        weights = gl.where(visible(columns, first_row, schedule, layout, ROWS), weights, 0.0)
    weights_tile = memory.more.index(number & 1)
    weights_tile.slice(MEMBER * ROWS, ROWS, dim=1).store(weights.to(dtype))
    if exponents.CAPPED:
        weights *= 1.0 - scores * scores
    delta = memory.delta.index(stage).slice(MEMBER * ROWS, ROWS, dim=1).load(layout)
    dweights = warpgroup_mma_wait(0, [dweights])
    slopes_tile = memory.slopes.index(number & 1)
    slopes_tile.slice(MEMBER * ROWS, ROWS, dim=1).store((weights * (dweights - delta)).to(dtype))
    fence_async_shared()
    named.meet(named.MET, named.BOTH)
    no_dq = gl.zeros([GROUP, HALF], gl.float32, wide)
    k_half = k_tile.slice(MEMBER * HALF, HALF, dim=1)
    dq = warpgroup_mma(slopes_tile.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma(weights_tile, dout_tile.slice(MEMBER * HALF, HALF, dim=1), dv, is_async=True)
    dk = warpgroup_mma(slopes_tile, q_tile.slice(MEMBER * HALF, HALF, dim=1), dk, is_async=True)
    # dQ is added while the tensor cores compute the products for dV and dK.
    dq = warpgroup_mma_wait(2, [dq])
    add(sums + gl.to_tensor(tile).to(gl.int64) * (GROUP * HEAD_DIM), dq)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    memory.dout.release(number)
    memory.q.release(number)
    return dk, dv


@gluon.jit
def compute(
    MEMBER: gl.constexpr, dk_desc, dv_desc, sums, memory, schedule, group, padded, scale, exponents,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A computing warp group: half of the columns of dK, dV and every tile of dQ."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    room_of_dk = room_in(memory.more if MEMBER == 0 else memory.slopes, dk_desc, 0)
    number = 0
    turn = 0
    kind, batch, head, first_row = memory.queue.hear(turn, 4)
    while kind != NONE:
        own = memory.queue.sequence(turn, schedule, 4)
        work = own.work_of(batch, head, first_row)
        dk = gl.zeros([GROUP, HALF], gl.float32, wide)
        dv = gl.zeros([GROUP, HALF], gl.float32, wide)
        columns = work.first_row + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
        first_sum = sums + ((work.matrix * group).to(gl.int64) * padded * HEAD_DIM + MEMBER * GROUP * HALF)
        dk, dv, number = over_tiles(
            step, dk, dv, memory, work, own, columns, number, group, padded, first_sum, exponents,
            MEMBER, HEAD_DIM, GROUP,
        )  # fmt: skip
        # Until nobody reads v, weights and slopes, which leave room for gradients.
        named.meet(named.MET, named.BOTH)
        store_gradients(
            dk_desc, dv_desc, own, work, work.first_row, MEMBER * HALF,
            room_in(memory.v, dv_desc, MEMBER), room_of_dk, (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        # The next scores lead to weights, which are written where gradients lie: no keys before those are stored.
        mbarrier.arrive(memory.k_read, count=1)
        mbarrier.arrive(memory.v_read, count=1)
        turn += 1
        kind, batch, head, first_row = memory.queue.hear(turn, 4)


@gluon.jit(do_not_specialize=NUMBERS)
def backward_wide_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    sums,
    counter,
    q_starts,
    k_starts,
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
    steepness,
    sequences,
    HEAD_DIM: gl.constexpr,
    TILE_Q: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    CAPPED: gl.constexpr,
    TO_THE_END: gl.constexpr,
    PERSISTENT: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid and arguments as of `backward_kernel`, with 64 keys a program; TILE_Q: 64.

    ``sums`` (matrices of q, padded, HEAD_DIM) are laid out as `add` does.
    """
    packing = new_packing(k_starts, q_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, k_len, q_len, -right, -left, section, packing, GROUP, TILE_Q, RIGHT, LEFT
    )  # fmt: skip
    exponents = Exponents(exponent_scale, steepness, CAPPED)
    dtype: gl.constexpr = q_desc.dtype
    pairs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, TILE_Q], dtype)
    k_read = new_barriers(1, 2).index(0)
    memory = Memory(
        new_queue(2, packing.PACKED), new_tiles(k_desc, 1), new_tiles(v_desc, 1),
        k_read, new_barriers(1, 2).index(0), k_read,
        NamedRing(new_tiles(q_desc, STAGES), new_barriers(STAGES, 1), named.Q_FREE, named.BOTH, STAGES),
        NamedRing(new_tiles(dout_desc, STAGES), new_barriers(STAGES, 1), named.DOUT_FREE, named.BOTH, STAGES),
        new_tiles(lse_desc, STAGES), new_tiles(delta_desc, STAGES),
        gl.allocate_shared_memory(dtype, [2, GROUP, TILE_Q], pairs_layout),
        gl.allocate_shared_memory(dtype, [2, GROUP, TILE_Q], pairs_layout),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (compute, (
            0, dk_desc, dv_desc, sums, memory, schedule, group, padded, scale, exponents, HEAD_DIM,
        )),
        (compute, (
            1, dk_desc, dv_desc, sums, memory, schedule, group, padded, scale, exponents, HEAD_DIM,
        )),
        (copy_ahead, (
            (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), counter, memory, schedule, group,
            HEAD_DIM, TILE_Q, PERSISTENT, False,
        )),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip
