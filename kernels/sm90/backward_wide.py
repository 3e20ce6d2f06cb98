"""The backward's consumer warp groups for head dimensions of q, k and v of 136 to 256, which share 64 keys.

dK and dV of 64 keys fill the registers of both warp groups, each of which has half of the columns. Both need all of P
and dS: each computes them for half of the rows of q, and they meet in shared memory. There is none left for dQ, which
is added to global memory from registers. Up to 192 columns are 128 and a tail, of which each warp group has half too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_consumer import buffer_in, epilogue, masked_probabilities, store_tail
from .backward_mainloop import mainloop
from .backward_products import no_sums
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero
from .lib.scheduler import STOP

ROWS = gl.constexpr(WG_ROWS.value // 2)
"""Rows of q whose scores a warp group computes."""


@gluon.jit
def half(tile, CONSUMER: gl.constexpr):
    """A warp group's half of the columns of a tile."""
    COLUMNS: gl.constexpr = tile.shape[1] // 2
    return tile.slice(CONSUMER * COLUMNS, COLUMNS, dim=1)


@gluon.jit
def start_rows(keys, keys_tail, pipeline, tails, n, zero, TAIL: gl.constexpr, CONSUMER: gl.constexpr,
               HEAD_DIM: gl.constexpr):  # fmt: skip
    """Issue the product of k or v with a warp group's rows of the n-th tile of q or dout. zero: an `opaque_zero`."""
    zeros = gl.zeros([WG_ROWS, ROWS], gl.float32, accumulator(ROWS))
    own = as_matrix(pipeline.buffer(n), WG_ROWS, HEAD_DIM).slice(CONSUMER * ROWS, ROWS, dim=0)
    keys_tile = as_matrix(keys.index(zero), WG_ROWS, HEAD_DIM)
    product = warpgroup_mma(keys_tile, own.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TAIL > 0:
        own = as_matrix(tails.index(pipeline.stage(n)), WG_ROWS, TAIL).slice(CONSUMER * ROWS, ROWS, dim=0)
        keys_tile = as_matrix(keys_tail.index(zero), WG_ROWS, TAIL)
        product = warpgroup_mma(keys_tile, own.permute((1, 0)), product, is_async=True)
    return product


@gluon.jit
def start_columns(operand, pipeline, tails, sums, n, TAIL: gl.constexpr, CONSUMER: gl.constexpr,
                  HEAD_DIM: gl.constexpr):  # fmt: skip
    """Issue the product of P or dS with a warp group's columns of the n-th tile of dout or q, and of its tail."""
    total, tail = sums
    tile = as_matrix(pipeline.buffer(n), WG_ROWS, HEAD_DIM)
    total = warpgroup_mma(operand, half(tile, CONSUMER), total, is_async=True)
    if TAIL > 0:
        tile = as_matrix(tails.index(pipeline.stage(n)), WG_ROWS, TAIL)
        tail = warpgroup_mma(operand, half(tile, CONSUMER), tail, is_async=True)
    return total, tail


@gluon.jit
def wide_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq_ptr, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to this warp group's columns of dK, dV and dQ.

    dk, dv: each with its tail (`no_sums`).
    """
    TAIL: gl.constexpr = memory.K_TAIL
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(ROWS)
    stage = memory.q.stage(n)
    inner = seq.visited(position, tile)
    first_row = inner * WG_ROWS + CONSUMER * ROWS
    zero = opaque_zero(n)
    memory.q.wait_full(n)
    s = start_rows(memory.k, memory.k_tail, memory.q, memory.q_tail, n, zero, TAIL, CONSUMER, HEAD_DIM)
    lse2 = memory.lse2.index(stage).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
    memory.dout.wait_full(n)
    dp = start_rows(memory.v, memory.v_tail, memory.dout, memory.dout_tail, n, zero, TAIL, CONSUMER, HEAD_DIM)
    bits = mods.dropout.draw(first_row, tile.start, seq.batch_of(tile), head, ROWS, True)
    s = scores.softcap(warpgroup_mma_wait(2 if TAIL > 0 else 1, [s]))
    p, slope = masked_probabilities(s, lse2, keys, first_row, seq, tile, head, scores, mods, MASKED)
    p_tile = memory.p_or_dq.index(n & 1)
    p_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store(mods.dropout.drop(p, bits, True).to(dtype))
    if scores.SOFTCAP:
        p *= 1.0 - s * s
    p = mods.chained(p, slope)
    delta = memory.delta.index(stage).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
    dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, True))
    ds_tile = memory.ds.index(n & 1)
    ds_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store((p * (dp - delta)).to(dtype))
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    dq, dq_tail = start_wide_dq(ds_tile, memory, zero, CONSUMER, HEAD_DIM)
    dv = start_columns(p_tile, memory.dout, memory.dout_tail, dv, n, TAIL, CONSUMER, HEAD_DIM)
    dk = start_columns(ds_tile, memory.q, memory.q_tail, dk, n, TAIL, CONSUMER, HEAD_DIM)
    # dQ is added while the tensor cores compute dV and dK.
    if TAIL > 0:
        dq, dq_tail = warpgroup_mma_wait(4, [dq, dq_tail])
    else:
        dq = warpgroup_mma_wait(2, [dq])
    dq_ptr += gl.to_tensor(inner).to(gl.int64) * (WG_ROWS * (HEAD_DIM + TAIL))
    if TAIL > 0:
        add_fragments(dq_ptr + WG_ROWS * (HEAD_DIM - CONSUMER * (HEAD_DIM - TAIL) // 2), dq_tail)
    add_fragments(dq_ptr, dq)
    dk, dv = finished_sums(dk, dv, TAIL)
    memory.dout.release(n)
    memory.q.release(n)
    return dk, dv


@gluon.jit
def start_wide_dq(ds_tile, memory, zero, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue a warp group's half of the columns of dQ, and of its tail's; a number without a tail."""
    dq, tail = no_sums(memory.K_TAIL // 2, HEAD_DIM // 2)
    operand = ds_tile.permute((1, 0))
    k_tile = half(as_matrix(memory.k.index(zero), WG_ROWS, HEAD_DIM), CONSUMER)
    dq = warpgroup_mma(operand, k_tile, dq, use_acc=False, is_async=True)
    if memory.K_TAIL > 0:
        k_tile = half(as_matrix(memory.k_tail.index(zero), WG_ROWS, memory.K_TAIL), CONSUMER)
        tail = warpgroup_mma(operand, k_tile, tail, use_acc=False, is_async=True)
    return dq, tail


@gluon.jit
def finished_sums(dk, dv, TAIL: gl.constexpr):
    """dK and dV, each with its tail, once all products are finished."""
    dk, dk_tail = dk
    dv, dv_tail = dv
    if TAIL > 0:
        dk, dk_tail, dv, dv_tail = warpgroup_mma_wait(0, [dk, dk_tail, dv, dv_tail])
    else:
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return (dk, dk_tail), (dv, dv_tail)


@gluon.jit
def wide_consumer(
    CONSUMER: gl.constexpr, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: half of the columns of dK, dV and every dQ tile."""
    HALF: gl.constexpr = HEAD_DIM // 2
    HALF_TAIL: gl.constexpr = tensors.K_TAIL // 2
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(ROWS)
    free = memory.p_or_dq if CONSUMER == 0 else memory.ds
    dk_buffer = buffer_in(free, tensors.dk, 0)
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        dk, dv = no_sums(HALF_TAIL, HALF), no_sums(HALF_TAIL, HALF)
        keys = tile.start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        first_dq = dq + (
            (tile.batch_head * heads_per_kv).to(gl.int64) * padded_len * (HEAD_DIM + tensors.K_TAIL)
            + CONSUMER * WG_ROWS * HALF
        )
        dk, dv, n = mainloop(
            wide_step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, padded_len, first_dq, scores, mods,
            CONSUMER, HEAD_DIM,
        )  # fmt: skip
        dk, dk_tail = dk
        dv, dv_tail = dv
        dv = mods.dropout.scale(dv)
        # Until no consumer reads v, P and dS, whose buffers store gradients.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        if HALF_TAIL > 0:
            column = HEAD_DIM + CONSUMER * HALF_TAIL
            tail_buffer = buffer_in(free, tensors.dk_tail, HALF // HALF_TAIL)
            store_tail(tensors.dk_tail, seq, tile, tile.start, tail_buffer, (dk_tail * scale).to(dtype), column)
            tail_buffer = buffer_in(memory.v_tail, tensors.dv_tail, CONSUMER)
            dv_tail = mods.dropout.scale(dv_tail).to(dtype)
            store_tail(tensors.dv_tail, seq, tile, tile.start, tail_buffer, dv_tail, column)
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
