"""The backward for head dimensions above 256: one launch computes dV, another dK and dQ.

A gradient of 64 keys fills the registers of both consumer warp groups, which share keys as in `backward_wide`. dV needs
S, dK needs S and dP. Of q and dout a launch reads one twice, which is whole in shared memory. The other one, of which
it computes S for dV, or dP for dK, comes in pieces of columns.
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

from ..versions import async_store
from .backward_consumer import buffer_in, masked_probabilities
from .backward_mainloop import mainloop
from .backward_piece_producer import row_buffer
from .backward_wide import ROWS, add_fragments
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero
from .lib.scheduler import STOP


@gluon.jit
def product_of_pieces(keys_tile, memory, n, CONSUMER: gl.constexpr):
    """Issue Sᵀ or dPᵀ (64, ROWS) for the n-th tile; also lse2 and delta. The last piece is not released."""
    pieces = memory.pieces
    layout: gl.constexpr = accumulator(ROWS)
    WIDTH: gl.constexpr = pieces.buffers.shape[-1]
    product = gl.zeros([WG_ROWS, ROWS], gl.float32, layout)
    for piece in gl.static_range(memory.PIECES):
        number = n * memory.PIECES + piece
        pieces.wait_full(number)
        own = as_matrix(pieces.buffer(number), WG_ROWS, WIDTH).slice(CONSUMER * ROWS, ROWS, dim=0)
        some_keys = keys_tile.slice(piece * WIDTH, WIDTH, dim=1)
        product = warpgroup_mma(some_keys, own.permute((1, 0)), product, use_acc=piece > 0, is_async=True)
        if piece == 0:
            lse2 = row_buffer(memory.lse2, n).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
            delta = row_buffer(memory.delta, n).slice(CONSUMER * ROWS, ROWS, dim=1).load(layout)
        else:
            product = warpgroup_mma_wait(1, [product])
            pieces.release(number - 1)
    return product, lse2, delta


@gluon.jit
def dv_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq_ptr, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to this warp group's columns of dV. Others are not used."""
    HALF: gl.constexpr = HEAD_DIM // 2
    first_row = seq.visited(position, tile) * WG_ROWS + CONSUMER * ROWS
    k_tile = as_matrix(memory.k.index(opaque_zero(n)), WG_ROWS, HEAD_DIM)
    s, lse2, _ = product_of_pieces(k_tile, memory, n, CONSUMER)
    bits = mods.dropout.draw(first_row, tile.start, seq.batch_of(tile), head, ROWS, True)
    s = scores.softcap(warpgroup_mma_wait(0, [s]))
    memory.pieces.release((n + 1) * memory.PIECES - 1)
    p, _ = masked_probabilities(s, lse2, keys, first_row, seq, tile, head, scores, mods, MASKED)
    p_tile = memory.scores.index(n & 1)
    p_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store(mods.dropout.drop(p, bits, True).to(p_tile.dtype))
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    memory.whole.wait_full(n)
    dout_tile = as_matrix(memory.whole.buffer(n), WG_ROWS, HEAD_DIM)
    dv = warpgroup_mma(p_tile, dout_tile.slice(CONSUMER * HALF, HALF, dim=1), dv, is_async=True)
    dv = warpgroup_mma_wait(0, [dv])
    memory.whole.release(n)
    return dk, dv


@gluon.jit
def dk_step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq_ptr, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to this warp group's columns of dK and dQ. dv is not used."""
    HALF: gl.constexpr = HEAD_DIM // 2
    PART: gl.constexpr = HALF // 2
    PARTS: gl.constexpr = HEAD_DIM // PART
    layout: gl.constexpr = accumulator(ROWS)
    inner = seq.visited(position, tile)
    first_row = inner * WG_ROWS + CONSUMER * ROWS
    zero = opaque_zero(n)
    k_tile = as_matrix(memory.k.index(zero), WG_ROWS, HEAD_DIM)
    dp, lse2, delta = product_of_pieces(as_matrix(memory.v.index(zero), WG_ROWS, HEAD_DIM), memory, n, CONSUMER)
    q_tile = as_matrix(memory.whole.buffer(n), WG_ROWS, HEAD_DIM)
    memory.whole.wait_full(n)
    s = gl.zeros([WG_ROWS, ROWS], gl.float32, layout)
    for part in gl.static_range(PARTS):
        # Else LLVM computes the addresses of all instructions before the first of them.
        zero = opaque_zero(n)
        some_k = as_matrix(memory.k.index(zero), WG_ROWS, HEAD_DIM).slice(part * PART, PART, dim=1)
        some_q = as_matrix(memory.whole.buffers.index(zero), WG_ROWS, HEAD_DIM).slice(part * PART, PART, dim=1)
        own_q = some_q.slice(CONSUMER * ROWS, ROWS, dim=0)
        s = warpgroup_mma(some_k, own_q.permute((1, 0)), s, use_acc=part > 0, is_async=True)
    bits = mods.dropout.draw(first_row, tile.start, seq.batch_of(tile), head, ROWS, True)
    dp = warpgroup_mma_wait(PARTS, [dp])
    memory.pieces.release((n + 1) * memory.PIECES - 1)
    dp = mods.dropout.scale(mods.dropout.drop(dp, bits, True)) - delta
    s = scores.softcap(warpgroup_mma_wait(0, [s]))
    p, slope = masked_probabilities(s, lse2, keys, first_row, seq, tile, head, scores, mods, MASKED)
    if scores.SOFTCAP:
        p *= 1.0 - s * s
    p = mods.chained(p, slope)
    ds_tile = memory.scores.index(0)
    # Until both have computed what they need the last dS for.
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    ds_tile.slice(CONSUMER * ROWS, ROWS, dim=1).store((p * dp).to(ds_tile.dtype))
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    dq_ptr += gl.to_tensor(inner).to(gl.int64) * (WG_ROWS * HEAD_DIM)
    no_dq = gl.zeros([WG_ROWS, PART], gl.float32, accumulator(PART))
    some_k = k_tile.slice(CONSUMER * HALF, PART, dim=1)
    dq = warpgroup_mma(ds_tile.permute((1, 0)), some_k, no_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_tile, q_tile.slice(CONSUMER * HALF, HALF, dim=1), dk, is_async=True)
    # A half of dQ is added while the tensor cores compute dK, and the next q arrives while they compute the other.
    dq = warpgroup_mma_wait(1, [dq])
    add_fragments(dq_ptr, dq)
    more_k = k_tile.slice(CONSUMER * HALF + PART, PART, dim=1)
    # Into the same registers: with more zeros there would be too few.
    dq = warpgroup_mma(ds_tile.permute((1, 0)), more_k, dq, use_acc=False, is_async=True)
    dk = warpgroup_mma_wait(1, [dk])
    memory.whole.release(n)
    dq = warpgroup_mma_wait(0, [dq])
    add_fragments(dq_ptr + WG_ROWS * PART, dq)
    return dk, dv


@gluon.jit
def piece_consumer(
    CONSUMER: gl.constexpr, tensors, dq, memory, tile_map, heads_per_kv, padded_len, scale, scores, mods,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: half of the columns of dV, or of dK and every dQ tile."""
    HALF: gl.constexpr = HEAD_DIM // 2
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        total = gl.zeros([WG_ROWS, HALF], gl.float32, accumulator(HALF))
        keys = tile.start + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, accumulator(ROWS)))
        # The gradient that a step does not add to is a number.
        if memory.OF_V:
            _, total, n = mainloop(
                dv_step, tile.start, total, memory, tile, seq, keys, n, heads_per_kv, padded_len, None, scores, mods,
                CONSUMER, HEAD_DIM,
            )  # fmt: skip
            total = mods.dropout.scale(total)
        else:
            first_dq = dq + (
                (tile.batch_head * heads_per_kv).to(gl.int64) * padded_len * HEAD_DIM + CONSUMER * WG_ROWS * HALF
            )
            total, _, n = mainloop(
                dk_step, total, tile.start, memory, tile, seq, keys, n, heads_per_kv, padded_len, first_dq, scores,
                mods, CONSUMER, HEAD_DIM,
            )  # fmt: skip
            total *= scale
            mbarrier.arrive(memory.v_empty, count=1)
        # Until no consumer reads k, whose buffer stores the gradient.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        buffer = buffer_in(memory.k, tensors.dk, CONSUMER)
        as_matrix(buffer, WG_ROWS, HALF).store(total.to(memory.k.dtype))
        fence_async_shared()
        async_store(tensors.dk, seq.outer_coords(tile.batch, tile.head, tile.start, CONSUMER * HALF), buffer)
        tma.store_wait(0)
        mbarrier.arrive(memory.k_empty, count=1)
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)
