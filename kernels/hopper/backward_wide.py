"""FlashAttention backward for heads of 256: as `backward`, but one program has 64 keys, and its warp groups share them.

The gradients of 64 keys fill the registers of two groups, each of which has half of the columns. Scores and what
follows from them are needed by both: each computes them for half of the rows of q, and both meet in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import named
from .backward import NUMBERS, free_room, over_tiles, store_gradients, visible
from .backward_copying import Memory, copy_ahead
from .packing import new_packing
from .ring import NamedRing, new_barriers, new_tiles
from .schedule import Schedule
from .softmax import Exponents
from .tiles import GROUP, add, as_matrix

ROWS = gl.constexpr(GROUP.value // 2)
"""Rows of q whose scores a group computes."""


@gluon.jit
def step(
    dk, dv, k_tile, v_tile, memory, schedule, columns, number, tile, sums, exponents,
    MASKED: gl.constexpr, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """What one tile of q and dout adds to this group's columns of dK, dV and dQ."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    stage = number % memory.q.stages
    nothing = gl.zeros([GROUP, ROWS], gl.float32, layout)
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
    weights = gl.exp2(scores * exponents.scale - lse)
    if MASKED:
        rows = tile * GROUP + MEMBER * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
        weights = gl.where(visible(columns, rows, schedule), weights, 0.0)
    weights_tile = memory.more.index(number % 2)
    weights_tile.slice(MEMBER * ROWS, ROWS, dim=1).store(weights.to(dtype))
    if exponents.CAPPED:
        weights *= 1.0 - scores * scores
    delta = memory.delta.index(stage).slice(MEMBER * ROWS, ROWS, dim=1).load(layout)
    dweights = warpgroup_mma_wait(0, [dweights])
    slopes_tile = memory.slopes.index(number % 2)
    slopes_tile.slice(MEMBER * ROWS, ROWS, dim=1).store((weights * (dweights - delta)).to(dtype))
    fence_async_shared()
    named.meet(named.MET, 2 * named.GROUP)
    no_dq = gl.zeros([GROUP, HALF], gl.float32, wide)
    k_half = k_tile.slice(MEMBER * HALF, HALF, dim=1)
    dq = warpgroup_mma(slopes_tile.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma(weights_tile, dout_tile.slice(MEMBER * HALF, HALF, dim=1), dv, is_async=True)
    dk = warpgroup_mma(slopes_tile, q_tile.slice(MEMBER * HALF, HALF, dim=1), dk, is_async=True)
    # dQ is added while the tensor cores compute the products for dV and dK.
    dq = warpgroup_mma_wait(2, [dq])
    add(sums + tile * (GROUP * HEAD_DIM), dq)
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
    work, own = schedule.work(gl.program_id(0))
    k_tile = as_matrix(memory.k, GROUP, HEAD_DIM)
    v_tile = as_matrix(memory.v.index(0), GROUP, HEAD_DIM)
    dk = gl.zeros([GROUP, HALF], gl.float32, wide)
    dv = gl.zeros([GROUP, HALF], gl.float32, wide)
    columns = work.first_row + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
    sums += (work.matrix * group).to(gl.int64) * padded * HEAD_DIM + MEMBER * GROUP * HALF
    dk, dv, number = over_tiles(
        step, dk, dv, k_tile, v_tile, memory, work, own, columns, group, padded, sums, exponents,
        MEMBER, HEAD_DIM, GROUP,
    )  # fmt: skip
    # Both groups have read v by now: each waited for the other's last gradients of scores.
    shape: gl.constexpr = [2] + dv_desc.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    rooms = memory.v._reinterpret(dtype, shape, dv_desc.layout)
    store_gradients(
        dk_desc, dv_desc, own, work, work.first_row, MEMBER * HALF, rooms.index(MEMBER),
        free_room(dk_desc, memory, number, MEMBER), (dk * scale).to(dtype), dv.to(dtype),
    )  # fmt: skip


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
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: a program for each tile of 64 keys of each matrix of k. Arguments as of `backward_kernel`; TILE_Q: 64.

    ``sums`` (matrices of q, padded, HEAD_DIM) are laid out as `add` does.
    """
    packing = new_packing(k_starts, q_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, k_len, q_len, -right, -left, section, packing, GROUP, TILE_Q, RIGHT, LEFT
    )  # fmt: skip
    exponents = Exponents(exponent_scale, steepness, CAPPED)
    dtype: gl.constexpr = q_desc.dtype
    pairs_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, TILE_Q], dtype)
    READERS: gl.constexpr = 2 * named.GROUP
    memory = Memory(
        new_tiles(k_desc, 1).index(0), new_tiles(v_desc, 1),
        NamedRing(new_tiles(q_desc, STAGES), new_barriers(STAGES, 1), named.Q_FREE, READERS, STAGES),
        NamedRing(new_tiles(dout_desc, STAGES), new_barriers(STAGES, 1), named.DOUT_FREE, READERS, STAGES),
        new_tiles(lse_desc, STAGES), new_tiles(delta_desc, STAGES),
        gl.allocate_shared_memory(dtype, [2, GROUP, TILE_Q], pairs_layout),
        gl.allocate_shared_memory(dtype, [2, GROUP, TILE_Q], pairs_layout),
    )  # fmt: skip
    fence_async_shared()
    if schedule.has_rows(gl.program_id(0)):
        gl.warp_specialize([
            (compute, (
                0, dk_desc, dv_desc, sums, memory, schedule, group, padded, scale, exponents, HEAD_DIM,
            )),
            (compute, (
                1, dk_desc, dv_desc, sums, memory, schedule, group, padded, scale, exponents, HEAD_DIM,
            )),
            (copy_ahead, (
                (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), memory, schedule, group, HEAD_DIM, TILE_Q,
            )),
        ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip
