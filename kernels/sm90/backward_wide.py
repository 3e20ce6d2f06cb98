"""The backward's consumer warp groups for head dimensions up to 256, which share 64 keys.

dK and dV of 64 keys fill the registers of both warp groups, each of which has half of the columns. Both need all of P
and dS: each computes them for half of the rows of q, and they meet in shared memory. There is none left for dQ, which
is added to global memory from registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_consumer import buffer_in, epilogue, masked_probabilities
from .backward_mainloop import mainloop
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero
from .lib.scheduler import STOP

ROWS = gl.constexpr(WG_ROWS.value // 2)
"""Rows of q whose scores a warp group computes."""


@gluon.jit
def wide_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq_ptr, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to this warp group's columns of dK, dV and dQ."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(ROWS)
    stage = memory.q.stage(n)
    zeros = gl.zeros([WG_ROWS, ROWS], gl.float32, layout)
    inner = seq.visited(position, tile)
    first_row = inner * WG_ROWS + CONSUMER * ROWS
    zero = opaque_zero(n)
    k_tile = as_matrix(memory.k.index(zero), WG_ROWS, HEAD_DIM)
    v_tile = as_matrix(memory.v.index(zero), WG_ROWS, HEAD_DIM)
    q_tile = as_matrix(memory.q.buffer(n), WG_ROWS, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.buffer(n), WG_ROWS, HEAD_DIM)
    memory.q.wait_full(n)
    own_q = q_tile.slice(CONSUMER * ROWS, ROWS, dim=0)
    s = warpgroup_mma(k_tile, own_q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse2 = memory.lse2.index(stage).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
    memory.dout.wait_full(n)
    own_dout = dout_tile.slice(CONSUMER * ROWS, ROWS, dim=0)
    dp = warpgroup_mma(v_tile, own_dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
    bits = mods.dropout.draw(first_row, tile.start, seq.batch_of(tile), head, ROWS, True)
    s = scores.softcap(warpgroup_mma_wait(1, [s]))
    p, slope = masked_probabilities(s, lse2, keys, first_row, seq, tile, head, scores, mods, MASKED)
    p_tile = memory.p_or_dq.index(n & 1)
    p_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store(mods.dropout.drop(p, bits, True).to(dtype))
    if scores.SOFTCAP:
        p *= 1.0 - s * s
    if mods.SCORE is not None:
        p *= slope
    delta = memory.delta.index(stage).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
    dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, True))
    ds_tile = memory.ds.index(n & 1)
    ds_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store((p * (dp - delta)).to(dtype))
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    no_dq = gl.zeros([WG_ROWS, HALF], gl.float32, accumulator(HALF))
    half_k = k_tile.slice(CONSUMER * HALF, HALF, dim=1)
    dq = warpgroup_mma(ds_tile.permute((1, 0)), half_k, no_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma(p_tile, dout_tile.slice(CONSUMER * HALF, HALF, dim=1), dv, is_async=True)
    dk = warpgroup_mma(ds_tile, q_tile.slice(CONSUMER * HALF, HALF, dim=1), dk, is_async=True)
    # dQ is added while the tensor cores compute dV and dK.
    dq = warpgroup_mma_wait(2, [dq])
    add_fragments(dq_ptr + gl.to_tensor(inner).to(gl.int64) * (WG_ROWS * HEAD_DIM), dq)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    memory.dout.release(n)
    memory.q.release(n)
    return dk, dv


@gluon.jit
def wide_consumer(
    CONSUMER: gl.constexpr, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: half of the columns of dK, dV and every dQ tile."""
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(ROWS)
    dk_buffer = buffer_in(memory.p_or_dq if CONSUMER == 0 else memory.ds, tensors.dk, 0)
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        dk = gl.zeros([WG_ROWS, HALF], gl.float32, accumulator(HALF))
        dv = gl.zeros([WG_ROWS, HALF], gl.float32, accumulator(HALF))
        keys = tile.start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        first_dq = dq + (
            (tile.batch_head * heads_per_kv).to(gl.int64) * padded_len * HEAD_DIM + CONSUMER * WG_ROWS * HALF
        )
        dk, dv, n = mainloop(
            wide_step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, padded_len, first_dq, scores, mods,
            CONSUMER, HEAD_DIM,
        )  # fmt: skip
        dv = mods.dropout.scale(dv)
        # Until no consumer reads v, P and dS, whose buffers store gradients.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        epilogue(
            tensors, seq, tile, tile.start, CONSUMER * HALF, buffer_in(memory.v, tensors.dv, CONSUMER), dk_buffer,
            (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        # P of the next tile is written where gradients lie: no k before they are stored.
        mbarrier.arrive(memory.k_empty, count=1)
        mbarrier.arrive(memory.v_empty, count=1)
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)


@gluon.constexpr_function
def additions(quads):
    """PTX that adds four registers of a thread at a time to where its pointer points, ``quads`` times."""
    lines = []
    for quad in range(quads):
        registers = ", ".join("$" + str(quads + 4 * quad + index) for index in range(4))
        lines.append(f"red.global.add.v4.f32 [${5 * quads} + {2048 * quad}], {{{registers}}};")
    return " ".join(lines)


@gluon.constexpr_function
def addition_constraints(quads):
    """Its operands: unused results, numbers, and pointers, which are all the same."""
    return ",".join(["=r"] * quads + ["r"] * (4 * quads) + ["l"] * (4 * quads))


@gluon.jit
def add_fragments(target, x):
    """Add a product (64, columns), in registers, to global memory in the order of accumulator fragments.

    Of every eight columns each thread holds four numbers, two in a row and two eight rows below: so an instruction of a
    warp adds to 512 contiguous bytes.
    """
    QUADS: gl.constexpr = x.shape[1] // 8
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    thread = rows // 16 * 32 + rows % 8 * 4 + columns % 8 // 2
    gl.inline_asm_elementwise(
        additions(QUADS), addition_constraints(QUADS), [x, (target + thread * 4).to(gl.int64)],
        dtype=gl.int8, is_pure=False, pack=4 * QUADS,
    )  # fmt: skip
