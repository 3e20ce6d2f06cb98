"""One step of the backward: what a tile of q and dout adds to dK, dV and dQ.

Each warp group computes with the transposed scores of its 64 keys, so that the weights and their gradients are left
operands in registers for dV and dK. For dQ the gradients of all keys have to meet in shared memory; each group then
computes its part of a tile of dQ, which a warp of its own adds to a float32 buffer.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import named
from .tiles import GROUP, as_matrix, packed, unpacked


@gluon.jit
def visible(columns, first_row, schedule, layout: gl.constexpr, ROWS: gl.constexpr):
    """Which pairs of columns and so many rows are seen. A column that does not exist has scores of 0, and is not.

    Places of rows are compared in two parts: a thread's are few numbers below 8, and multiples of 8 known beforehand.
    """
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    seen = (columns < schedule.q_len)[:, None]
    if schedule.LEFT:
        seen = seen & ((columns - (first_row - schedule.left))[:, None] - rows % 8 <= rows // 8 * 8)
    if schedule.RIGHT:
        seen = seen & ((columns - (first_row - schedule.right))[:, None] - rows % 8 >= rows // 8 * 8)
    return seen


@gluon.jit
def weights_of(exponents):
    """Probabilities, from exponents of 2 that rounding may have left above 0, which it does to large scores."""
    return gl.exp2(gl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL))


@gluon.jit
def slopes_product(slopes_tile, k_tile, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr):
    """Begin a group's part of a tile of dQ: of its columns if the tile has 64 rows, or else 64 of its 128 rows."""
    WIDTH: gl.constexpr = HEAD_DIM * TILE_Q // k_tile.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    nothing = gl.zeros([GROUP, WIDTH], gl.float32, layout)
    if TILE_Q == GROUP:
        k_tile = k_tile.slice(MEMBER * WIDTH, WIDTH, dim=1)
    else:
        slopes_tile = slopes_tile.slice(MEMBER * GROUP, GROUP, dim=1)
    return warpgroup_mma(slopes_tile.permute((1, 0)), k_tile, nothing, use_acc=False, is_async=True)


@gluon.jit
def hand_over(dq, room, MEMBER: gl.constexpr):
    """Give a group's part of a tile of dQ to the adding warp, in the order in which threads hold it, as `tiles.add`."""
    THREADS: gl.constexpr = named.GROUP + named.WARP
    WIDTH: gl.constexpr = dq.shape[1]
    named.meet(named.TAKEN + MEMBER, THREADS)
    # Four warps, two rows eight apart, eight rows; columns by eights, four threads, two in a row.
    values = gl.permute(gl.reshape(dq, [4, 2, 8, WIDTH // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    room.store(gl.reshape(values, [room.shape[0], room.shape[1]]))
    fence_async_shared()
    named.arrive(named.FULL + MEMBER, THREADS)


@gluon.jit
def zero_of_a_step(number):
    """0, which LLVM does not know before the step: addresses that it knows before it computes, and there is no room."""
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def is_over_waited_for(tile_q, capped):
    """Whether a step waits for `Memory.over`."""
    return tile_q == GROUP and not capped


@gluon.jit
def step(
    dk, dv, memory, schedule, columns, number, tile, sums, exponents,
    MASKED: gl.constexpr, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """What one tile of q and dout adds to dK, dV and dQ."""
    dtype: gl.constexpr = memory.k.dtype
    # Numbers of rows wait in registers, as many as there are of a tile of 64.
    EARLY: gl.constexpr = TILE_Q == GROUP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    stage = memory.q.stage(number)
    nothing = gl.zeros([GROUP, TILE_Q], gl.float32, layout)
    KEYS: gl.constexpr = schedule.TILE_Q
    zero = zero_of_a_step(number)
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    v_own = as_matrix(memory.v.index(zero + MEMBER), GROUP, HEAD_DIM)
    k_own = k_tile.slice(MEMBER * GROUP, GROUP, dim=0)
    q_tile = as_matrix(memory.q.tile(number), TILE_Q, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.tile(number), TILE_Q, HEAD_DIM)
    memory.q.wait_full(number)
    scores = warpgroup_mma(k_own, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    if EARLY:
        lse = memory.lse.index(stage).load(layout)
    memory.dout.wait_full(number)
    dweights = warpgroup_mma(v_own, dout_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = exponents.cap(warpgroup_mma_wait(1, [scores]))
    if not EARLY:
        lse = memory.lse.index(stage).load(layout)
    weights = weights_of(scores * exponents.scale - lse)
    if EARLY:
        delta = memory.delta.index(stage).load(layout)
    if MASKED:
        weights = gl.where(visible(columns, tile * TILE_Q, schedule, layout, TILE_Q), weights, 0.0)
    if is_over_waited_for(TILE_Q, exponents.CAPPED):
        operand_of_dv = unpacked(packed(weights, dtype, True), dtype, wide, TILE_Q)
        # Without a branch, the assembler moves the wait for the product below above the exponentials.
        mbarrier.wait(memory.over, 1)
    else:
        # Twice as many take longer by themselves than mixed with what follows; and with a cap, scores have to be kept.
        operand_of_dv = gl.convert_layout(weights.to(dtype), operand)
    if exponents.CAPPED:
        # The derivative of the cap.
        weights *= 1.0 - scores * scores
    dweights = warpgroup_mma_wait(0, [dweights])
    if not EARLY:
        delta = memory.delta.index(stage).load(layout)
    slopes = (weights * (dweights - delta)).to(dtype)
    slopes_tile = memory.slopes.index(number & 1)
    slopes_tile.slice(MEMBER * GROUP, GROUP, dim=0).store(slopes)
    zero = zero_of_a_step(number)
    # Begun before, this would hold the warps up until the tensor cores had read all its weights from their registers.
    dv = warpgroup_mma(operand_of_dv, dout_tile, dv, is_async=True)
    fence_async_shared()
    named.meet(named.MET, named.BOTH)
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    dq = slopes_product(memory.slopes.index(number + zero & 1), k_tile, MEMBER, HEAD_DIM, TILE_Q)
    operand_of_dk = gl.convert_layout(slopes, operand)
    q_tile = as_matrix(memory.q.tile(number + zero), TILE_Q, HEAD_DIM)
    dk = warpgroup_mma(operand_of_dk, q_tile, dk, is_async=True)
    # dQ is handed over while the tensor cores compute the product for dK.
    dq, dv, _ = warpgroup_mma_wait(1, [dq, dv, operand_of_dv])
    memory.dout.release(number)
    hand_over(dq, memory.more.index(MEMBER), MEMBER)
    dk, _ = warpgroup_mma_wait(0, [dk, operand_of_dk])
    memory.q.release(number)
    return dk, dv
