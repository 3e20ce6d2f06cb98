"""The backward's consumer warp groups for q and k of 136 to 192 columns and v of up to 128, each with 64 keys.

As in `backward_consumer`, but q, k and dK have a tail: a second tile, of K_TAIL columns. dK and dV of 64 keys take 160
registers, so little else may be there at a time: S, then dP; P in 16 bits; first the dQ of a warp group's half of the
HEAD_DIM columns, then that of its half of the tail. dK's A operand is dS in shared memory, so that its product can be
issued in the next step, whose exponentials it overlaps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_consumer import buffer_in, epilogue, masked_probabilities, store_tail, with_pairs
from .backward_mainloop import mainloop
from .backward_products import first_dq_buffer, hand_over, start_dq, start_s, wait_until_empty
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero, pack_pairs, unpack_operand
from .lib.scheduler import STOP


@gluon.jit
def split_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to dV, dQ and dK. ``dq`` is not used.

    dk: dK without what the step before contributes, which this one adds; dK's tail; the number of the tile of q of the
    step before. In a first step dS is 0, and the number n.
    """
    KEYS: gl.constexpr = seq.OUTER_TILE
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(WG_ROWS)
    wide: gl.constexpr = accumulator(HEAD_DIM)
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    stage = memory.q.stage(n)
    inner = seq.visited(position, tile)
    own_v = as_matrix(memory.v.index(opaque_zero(n) + CONSUMER), WG_ROWS, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.buffer(n), WG_ROWS, HEAD_DIM)
    dk, dk_tail, before = dk
    memory.q.wait_full(n)
    s = start_s(memory, n, opaque_zero(n), CONSUMER, HEAD_DIM)
    # The tensor cores compute the dK of the step before while exponentials are computed.
    dk = start_dk(dk, memory, before, CONSUMER, HEAD_DIM)
    bits = mods.dropout.draw(
        inner * WG_ROWS, tile.start + CONSUMER * WG_ROWS, seq.batch_of(tile), head, WG_ROWS, True
    )  # fmt: skip
    s = scores.softcap(warpgroup_mma_wait(1, [s]))
    lse2 = memory.lse2.index(stage).load(layout)
    rules = with_pairs(mods, memory, n, CONSUMER, WG_ROWS)
    p, slope = masked_probabilities(s, lse2, keys, inner * WG_ROWS, seq, tile, head, scores, rules, MASKED)
    p_operand = unpack_operand(pack_pairs(p, dtype, True), dtype, wide, WG_ROWS)
    # A float32 P and dP do not fit into registers together.
    sloped = p_operand
    if scores.SOFTCAP:
        sloped = unpack_operand(pack_pairs(p * (1.0 - s * s), dtype, True), dtype, wide, WG_ROWS)
    memory.dout.wait_full(n)
    zeros = gl.zeros([WG_ROWS, WG_ROWS], gl.float32, layout)
    dp = warpgroup_mma(own_v, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    p = gl.convert_layout(sloped, layout).to(gl.float32)
    p = mods.chained(p, slope)
    if mods.dropout.DROPS:
        kept = mods.dropout.drop(gl.convert_layout(p_operand, layout).to(gl.float32), bits, True)
        p_operand = gl.convert_layout(kept.to(dtype), operand)
    dk = warpgroup_mma_wait(1, [dk])
    if before < n:
        memory.q.release(before)
    dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, True))
    ds = (p * (dp - memory.delta.index(stage).load(layout))).to(dtype)
    # Both warp groups have handed over their dQ of the step before, so neither reads the one buffer of dS any more.
    wait_until_empty(CONSUMER)
    memory.ds.index(0).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0).store(ds)
    dv = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    dk_tail, dv = finish_step(dk_tail, dv, p_operand, memory, n, KEYS, CONSUMER, HEAD_DIM)
    return (dk, dk_tail, gl.to_tensor(n)), dv


@gluon.jit
def start_dk(dk, memory, n, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue dK += dS q for the n-th tile of q."""
    own_ds = memory.ds.index(opaque_zero(n)).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0)
    return warpgroup_mma(own_ds, as_matrix(memory.q.buffer(n), WG_ROWS, HEAD_DIM), dk, is_async=True)


@gluon.jit
def finish_step(
    dk_tail, dv, p_operand, memory, n, KEYS: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """dK's tail and dV after a step, whose dV is issued and whose dS is in shared memory. Hands dQ over."""
    zero = opaque_zero(n)
    ds_tile = memory.ds.index(zero)
    own_ds = ds_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0)
    dq = start_dq(ds_tile, as_matrix(memory.k.index(zero), KEYS, HEAD_DIM), CONSUMER, WG_ROWS)
    dv, _ = warpgroup_mma_wait(1, [dv, p_operand])
    memory.dout.release(n)
    dq_tail = start_dq(ds_tile, as_matrix(memory.k_tail.index(zero), KEYS, memory.K_TAIL), CONSUMER, WG_ROWS)
    q_tail = as_matrix(memory.q_tail.index(memory.q.stage(n) + zero), WG_ROWS, memory.K_TAIL)
    dk_tail = warpgroup_mma(own_ds, q_tail, dk_tail, is_async=True)
    # Both parts of dQ are handed over while the tensor cores compute what follows them.
    dq = warpgroup_mma_wait(2, [dq])
    hand_over(dq, first_dq_buffer(memory, CONSUMER), named_barriers.DQ_FULL + CONSUMER)
    dq_tail = warpgroup_mma_wait(1, [dq_tail])
    hand_over(dq_tail, memory.p_or_dq.index(4 + CONSUMER), named_barriers.DQ_TAIL_FULL + CONSUMER)
    dk_tail = warpgroup_mma_wait(0, [dk_tail])
    return dk_tail, dv


@gluon.jit
def split_consumer(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of its 64 keys of each tile, and half of every dQ tile."""
    dtype: gl.constexpr = memory.k.dtype
    TAIL: gl.constexpr = tensors.K_TAIL
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        no_dk = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
        dv = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
        dk = no_dk, gl.zeros([WG_ROWS, TAIL], gl.float32, accumulator(TAIL)), gl.to_tensor(n)
        first = n
        memory.ds.index(0).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0).store(
            gl.zeros([WG_ROWS, WG_ROWS], dtype, accumulator(WG_ROWS))
        )
        fence_async_shared()
        first_key = tile.start + CONSUMER * WG_ROWS
        keys = first_key + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, accumulator(WG_ROWS)))
        dk, dv, n = mainloop(
            split_step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, None, None, scores, mods, CONSUMER, HEAD_DIM
        )  # fmt: skip
        dk, dk_tail, before = dk
        if n > first:
            dk = warpgroup_mma_wait(0, [start_dk(dk, memory, before, CONSUMER, HEAD_DIM)])
            memory.q.release(before)
        dv = mods.dropout.scale(dv)
        # Until no consumer reads k, whose buffers store dK.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        tail_buffer = buffer_in(memory.k_tail, tensors.dk_tail, CONSUMER)
        store_tail(tensors.dk_tail, seq, tile, first_key, tail_buffer, (dk_tail * scale).to(dtype), HEAD_DIM)
        epilogue(
            tensors, seq, tile, first_key, 0, memory.v.index(CONSUMER), buffer_in(memory.k, tensors.dk, CONSUMER),
            (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        mbarrier.arrive(memory.k_empty, count=1)
        mbarrier.arrive(memory.v_empty, count=1)
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)
