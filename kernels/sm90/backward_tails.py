"""The backward's consumer warp groups for 72 to 96 columns of q and k, each with 64 keys.

As in `backward_consumer`, but q, k and dK have a tail: a second tile, of K_TAIL columns. So do dout, v and dV, of
V_TAIL columns, unless v has no more than HEAD_DIM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_consumer import (
    buffer_in,
    early_lse2,
    epilogue,
    finish_scores,
    hand_over,
    store_tail,
    wait_until_empty,
)
from .backward_mainloop import mainloop
from .backward_split import first_dq_buffer, start_s
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero
from .lib.scheduler import STOP


@gluon.jit
def tails_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to dK, dV and dQ. ``dq`` is not used.

    dk, dv: each with its tail.
    """
    KEYS: gl.constexpr = seq.OUTER_TILE
    PRODUCTS: gl.constexpr = 1 if memory.V_TAIL == 0 else 2
    stage = memory.q.stage(n)
    inner = seq.visited(position, tile)
    memory.q.wait_full(n)
    s = start_s(memory, n, stage, KEYS, CONSUMER, HEAD_DIM)
    lse2 = early_lse2(memory, n, WG_ROWS)
    memory.dout.wait_full(n)
    dp = start_dp(memory, n, stage, CONSUMER, HEAD_DIM)
    p_operand, ds = finish_scores(
        s, dp, lse2, memory, seq, tile, head, keys, n, inner, scores, mods, PRODUCTS, MASKED, CONSUMER, HEAD_DIM
    )  # fmt: skip
    dv = start_products(p_operand, memory.dout, memory.dout_tail, dv, n, memory.V_TAIL, HEAD_DIM)
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    zero = opaque_zero(n)
    dq = start_part_of_dq(memory, n, zero, KEYS, CONSUMER, HEAD_DIM)
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator(HEAD_DIM), 2))
    dk = start_products(ds_operand, memory.q, memory.q_tail, dk, n + zero, memory.K_TAIL, HEAD_DIM)
    # dQ is handed over while the tensor cores compute dK.
    dq = warpgroup_mma_wait(2, [dq])
    dv = finished(dv, p_operand, 2, memory.V_TAIL)
    memory.dout.release(n)
    wait_until_empty(CONSUMER)
    if CONSUMER == 0:
        hand_over(dq, first_dq_buffer(memory, 0), named_barriers.DQ_FULL)
    else:
        hand_over(dq, memory.p_or_dq.index(2), named_barriers.DQ_FULL + 1)
    dk = finished(dk, ds_operand, 0, memory.K_TAIL)
    memory.q.release(n)
    return dk, dv


@gluon.jit
def start_part_of_dq(memory, n, zero, KEYS: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue a warp group's part of a dQ tile: HEAD_DIM columns, or the tail.

    Half of both for each would read dS from shared memory twice as often, which takes longer than the products.
    """
    if CONSUMER == 0:
        k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    else:
        k_tile = as_matrix(memory.k_tail.index(zero), KEYS, memory.K_TAIL)
    COLUMNS: gl.constexpr = k_tile.shape[1]
    zeros = gl.zeros([WG_ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    return warpgroup_mma(memory.ds.index(n + zero & 1).permute((1, 0)), k_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def start_dp(memory, n, stage, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue dPᵀ of a warp group's keys and the n-th tile of dout."""
    zero = opaque_zero(n)
    zeros = gl.zeros([WG_ROWS, WG_ROWS], gl.float32, accumulator(WG_ROWS))
    v_tile = as_matrix(memory.v.index(zero + CONSUMER), WG_ROWS, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.buffer(n), WG_ROWS, HEAD_DIM)
    dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if memory.V_TAIL > 0:
        v_tile = as_matrix(memory.v_tail.index(zero + CONSUMER), WG_ROWS, memory.V_TAIL)
        dout_tile = as_matrix(memory.dout_tail.index(stage), WG_ROWS, memory.V_TAIL)
        dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), dp, is_async=True)
    return dp


@gluon.jit
def start_products(operand, pipeline, tails, sums, n, TAIL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue the product of an operand in registers with the n-th tile of a pipeline, and the same with its tail."""
    total, tail = sums
    total = warpgroup_mma(operand, as_matrix(pipeline.buffer(n), WG_ROWS, HEAD_DIM), total, is_async=True)
    if TAIL > 0:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(TAIL), 2)
        tile = as_matrix(tails.index(pipeline.stage(n)), WG_ROWS, TAIL)
        tail = warpgroup_mma(gl.convert_layout(operand, layout, assert_trivial=True), tile, tail, is_async=True)
    return total, tail


@gluon.jit
def finished(sums, operand, LEFT: gl.constexpr, TAIL: gl.constexpr):
    """What `start_products` issued, after waiting until LEFT products are left."""
    total, tail = sums
    if TAIL > 0:
        total, tail, _ = warpgroup_mma_wait(LEFT, [total, tail, operand])
    else:
        total, _ = warpgroup_mma_wait(LEFT, [total, operand])
    return total, tail


@gluon.jit
def no_sums(TAIL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeros for dK or dV and its tail, a number where that has no columns."""
    total = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
    if TAIL > 0:
        tail = gl.zeros([WG_ROWS, TAIL], gl.float32, accumulator(TAIL))
    else:
        tail = gl.to_tensor(0)
    return total, tail


@gluon.jit
def tails_consumer(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of its 64 keys of each tile, and a part of every dQ tile."""
    dtype: gl.constexpr = memory.k.dtype
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        first_key = tile.start + CONSUMER * WG_ROWS
        keys = first_key + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, accumulator(WG_ROWS)))
        dk, dv = no_sums(tensors.K_TAIL, HEAD_DIM), no_sums(tensors.V_TAIL, HEAD_DIM)
        dk, dv, n = mainloop(
            tails_step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, None, None, scores, mods, CONSUMER, HEAD_DIM
        )  # fmt: skip
        dk, dk_tail = dk
        dv, dv_tail = dv
        # Until no consumer reads k, whose buffers store dK.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        dk_buffer = buffer_in(memory.k_tail, tensors.dk_tail, CONSUMER)
        store_tail(tensors.dk_tail, seq, tile, first_key, dk_buffer, (dk_tail * scale).to(dtype), HEAD_DIM)
        if tensors.V_TAIL > 0:
            dv_tail = mods.dropout.scale(dv_tail).to(dtype)
            store_tail(tensors.dv_tail, seq, tile, first_key, memory.v_tail.index(CONSUMER), dv_tail, HEAD_DIM)
        epilogue(
            tensors, seq, tile, first_key, 0, memory.v.index(CONSUMER), buffer_in(memory.k, tensors.dk, CONSUMER),
            (dk * scale).to(dtype), mods.dropout.scale(dv).to(dtype),
        )  # fmt: skip
        mbarrier.arrive(memory.k_empty, count=1)
        mbarrier.arrive(memory.v_empty, count=1)
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)
