"""The backward's consumer warp groups for head dimensions up to 128, each with 64 keys.

Each computes transposed scores Sᵀ = k qᵀ of its keys, so that P and dS are A operands in registers for dV and dK. For
dQ the dS of all keys meets in shared memory; each warp group computes half of a dQ tile, which `dq_reducer` adds up.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..versions import async_store, reinterpret
from .backward_mainloop import mainloop
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero, pack_pairs, unpack_operand
from .lib.mods import ZERO, Pairs, opaque
from .lib.scheduler import STOP


@gluon.jit
def visible(keys, first_row, seq, layout: gl.constexpr, ROWS: gl.constexpr):
    """Which pairs of the keys (64,) and ROWS rows of q are not masked. Keys that do not exist, with S = 0, are.

    Rows are compared in two parts: a thread's are few numbers below 8, and multiples of 8 known when compiled.
    """
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    seen = (keys < seq.outer_len)[:, None]
    if seq.LEFT:
        seen = seen & (opaque((keys - (first_row - seq.left))[:, None] - rows % 8) <= rows // 8 * 8)
    if seq.RIGHT:
        seen = seen & (opaque((keys - (first_row - seq.right))[:, None] - rows % 8) >= rows // 8 * 8)
    return seen


@gluon.jit
def pairs_of(keys, first_row, seq, tile, head, layout: gl.constexpr, ROWS: gl.constexpr):
    """The pairs of the keys (64,) and ROWS rows of a query head's q."""
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))[None, :]
    if not seq.INNER_DIVISIBLE:
        rows = seq.nearest_inner(rows)
    return Pairs(seq.batch_of(tile), head, rows, seq.nearest_outer(keys)[:, None])


@gluon.jit
def with_pairs(mods, memory, n, CONSUMER: gl.constexpr, TILE_Q: gl.constexpr):
    """The rules for the n-th tile of q: what they read of a `PairTensor` is in shared memory."""
    if memory.pairs.ARGUMENT is not None:
        if memory.pair_pipeline.stages < memory.q.stages:
            memory.pair_pipeline.wait_full(n)
        buffer = memory.pairs.buffer(memory.pair_pipeline.stage(n), CONSUMER)
        tile = as_matrix(buffer, TILE_Q, WG_ROWS).permute((1, 0)).load(accumulator(TILE_Q))
        mods = mods.reading(tile, memory.pairs.ARGUMENT)
    return mods


@gluon.jit
def probabilities(exponents):
    """P from exponents of 2, which rounding may have left above 0 where scores are large."""
    return gl.exp2(gl.minimum(exponents, 0.0, propagate_nan=tl.PropagateNan.ALL))


@gluon.jit
def masked_probabilities(s, lse2, keys, first_row, seq, tile, head, scores, mods, MASKED: gl.constexpr):
    """P of capped scores, and the derivative of what changed them."""
    ROWS: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    pairs = pairs_of(keys, first_row, seq, tile, head, layout, ROWS)
    changed, slope = mods.differentiate(s, pairs)
    p = probabilities(changed * scores.scale - lse2)
    if MASKED:
        seen = visible(keys, first_row, seq, layout, ROWS)
        if seq.RIGHT or mods.MASK is not None:
            p = mods.hide_unseen(p, seen, pairs, ZERO)
        else:
            # With a causal mask alone this was measured to be a little faster, in spite of more instructions.
            p = gl.where(seen, p, 0.0)
    return p, slope


@gluon.jit
def start_dq(ds_tile, k_tile, CONSUMER: gl.constexpr, TILE_Q: gl.constexpr):
    """Issue a warp group's half of a dQ tile: half of its columns if it has 64 rows, or 64 of its 128 rows."""
    COLUMNS: gl.constexpr = k_tile.shape[1] * TILE_Q // k_tile.shape[0]
    zeros = gl.zeros([WG_ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    if TILE_Q == WG_ROWS:
        k_tile = k_tile.slice(CONSUMER * COLUMNS, COLUMNS, dim=1)
    else:
        ds_tile = ds_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, dim=1)
    return warpgroup_mma(ds_tile.permute((1, 0)), k_tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def wait_until_empty(CONSUMER: gl.constexpr):
    """Wait until `dq_reducer` has read what a warp group handed over in the step before."""
    named_barriers.sync(named_barriers.DQ_EMPTY + CONSUMER, named_barriers.WARP_GROUP + named_barriers.WARP)


@gluon.jit
def hand_over(dq, buffer, FULL: gl.constexpr):
    """Store a warp group's half of a dQ tile for `dq_reducer`, in the order of accumulator fragments.

    FULL: the number of the named barrier that tells it.
    """
    THREADS: gl.constexpr = named_barriers.WARP_GROUP + named_barriers.WARP
    COLUMNS: gl.constexpr = dq.shape[1]
    # Four warps, two rows eight apart, eight rows; columns by eights, four threads, two in a row.
    fragments = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    buffer.store(gl.reshape(fragments, [buffer.shape[0], buffer.shape[1]]))
    fence_async_shared()
    named_barriers.arrive(FULL, THREADS)


@gluon.constexpr_function
def waits_for_never(tile_q, softcap, score):
    """Whether a step waits for `SharedMemory.never`."""
    return tile_q == WG_ROWS and not softcap and score is None


@gluon.jit
def early_lse2(memory, n, TILE_Q: gl.constexpr):
    """lse2 of the n-th tile of q, if it has 64 rows: registers hold that of 128 only when it is needed; else n."""
    lse2 = n
    if TILE_Q == WG_ROWS:
        lse2 = memory.lse2.index(memory.q.stage(n)).load(accumulator(TILE_Q))
    return lse2


@gluon.jit
def finish_scores(
    s, dp, lse2, memory, seq, tile, head, keys, n, inner, scores, mods,
    DP_PRODUCTS: gl.constexpr, MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """From the product for S and the DP_PRODUCTS for dP after it: P as an operand for dV, and dS, stored as well.

    lse2: see `early_lse2`.
    """
    TILE_Q: gl.constexpr = seq.INNER_TILE
    dtype: gl.constexpr = memory.k.dtype
    EARLY: gl.constexpr = TILE_Q == WG_ROWS
    layout: gl.constexpr = accumulator(TILE_Q)
    stage = memory.q.stage(n)
    first_key = tile.start + CONSUMER * WG_ROWS
    bits = mods.dropout.draw(inner * TILE_Q, first_key, seq.batch_of(tile), head, TILE_Q, True)
    s = scores.softcap(warpgroup_mma_wait(DP_PRODUCTS, [s]))
    if not EARLY:
        lse2 = memory.lse2.index(stage).load(layout)
    rules = with_pairs(mods, memory, n, CONSUMER, TILE_Q)
    if EARLY:
        delta = memory.delta.index(stage).load(layout)
    p, slope = masked_probabilities(s, lse2, keys, inner * TILE_Q, seq, tile, head, scores, rules, MASKED)
    WAITS: gl.constexpr = waits_for_never(TILE_Q, scores.SOFTCAP, mods.SCORE)
    pairs = mods.dropout.drop_packed(pack_pairs(p, dtype, WAITS), bits, True)
    p_operand = unpack_operand(pairs, dtype, accumulator(HEAD_DIM), TILE_Q)
    # Twice as many exponentials take longer alone than mixed with dS; and a soft cap has to keep S.
    if WAITS:
        # Without a branch, ptxas moves the wait for dP above the exponentials.
        mbarrier.wait(memory.never, 1)
    if scores.SOFTCAP:
        # The derivative of tanh.
        p *= 1.0 - s * s
    if mods.SCORE is not None:
        p *= slope
    dp = mods.dropout.scale(mods.dropout.drop(warpgroup_mma_wait(0, [dp]), bits, True, EARLY))
    if not EARLY:
        delta = memory.delta.index(stage).load(layout)
    ds = (p * (dp - delta)).to(dtype)
    memory.ds.index(n & 1).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0).store(ds)
    return p_operand, ds


@gluon.jit
def step(
    dk, dv, memory, seq, tile, head, keys, n, position, dq, scores, mods,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add what the n-th tile of q and dout contributes to dK, dV and dQ. ``dq`` is not used."""
    KEYS: gl.constexpr = seq.OUTER_TILE
    TILE_Q: gl.constexpr = seq.INNER_TILE
    layout: gl.constexpr = accumulator(TILE_Q)
    wide: gl.constexpr = accumulator(HEAD_DIM)
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    zeros = gl.zeros([WG_ROWS, TILE_Q], gl.float32, layout)
    inner = seq.visited(position, tile)
    zero = opaque_zero(n)
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    own_v = as_matrix(memory.v.index(zero + CONSUMER), WG_ROWS, HEAD_DIM)
    own_k = k_tile.slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0)
    q_tile = as_matrix(memory.q.buffer(n), TILE_Q, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.buffer(n), TILE_Q, HEAD_DIM)
    memory.q.wait_full(n)
    s = warpgroup_mma(own_k, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse2 = early_lse2(memory, n, TILE_Q)
    memory.dout.wait_full(n)
    dp = warpgroup_mma(own_v, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    p_operand, ds = finish_scores(
        s, dp, lse2, memory, seq, tile, head, keys, n, inner, scores, mods, 1, MASKED, CONSUMER, HEAD_DIM
    )  # fmt: skip
    zero = opaque_zero(n)
    # Issued before dS, this would stall the warps until the tensor cores had read all of P from their registers.
    dv = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    if memory.pair_pipeline.stages < memory.q.stages:
        # What dS was computed of has been read.
        memory.pair_pipeline.release(n)
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    dq = start_dq(memory.ds.index(n + zero & 1), k_tile, CONSUMER, TILE_Q)
    ds_operand = gl.convert_layout(ds, operand)
    q_tile = as_matrix(memory.q.buffer(n + zero), TILE_Q, HEAD_DIM)
    dk = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    # dQ is handed over while the tensor cores compute dK.
    dq, dv, _ = warpgroup_mma_wait(1, [dq, dv, p_operand])
    memory.dout.release(n)
    wait_until_empty(CONSUMER)
    hand_over(dq, memory.p_or_dq.index(CONSUMER), named_barriers.DQ_FULL + CONSUMER)
    dk, _ = warpgroup_mma_wait(0, [dk, ds_operand])
    memory.q.release(n)
    return dk, dv


@gluon.jit
def consumer(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of its 64 keys of each tile, and half of every dQ tile."""
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(tile_map.INNER_TILE)
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        dk = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
        dv = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
        first_key = tile.start + CONSUMER * WG_ROWS
        keys = first_key + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        dk, dv, n = mainloop(
            step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, None, None, scores, mods, CONSUMER, HEAD_DIM
        )  # fmt: skip
        dv = mods.dropout.scale(dv)
        mbarrier.arrive(memory.k_empty, count=1)
        # Until no consumer reads dS, whose buffers store dK.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        epilogue(
            tensors, seq, tile, first_key, 0, memory.v.index(CONSUMER), buffer_in(memory.ds, tensors.dk, CONSUMER),
            (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        mbarrier.arrive(memory.v_empty, count=1)
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 4)


@gluon.constexpr_function
def tiles_in(elements, block_shape):
    """The number of tiles of a shape in this many elements."""
    for size in block_shape:
        elements //= size
    return elements


@gluon.jit
def buffer_in(memory, desc, INDEX: gl.constexpr):
    """The INDEX-th buffer for a descriptor's tiles in shared memory of another shape."""
    COUNT: gl.constexpr = tiles_in(memory.numel, desc.block_shape)
    shape: gl.constexpr = [COUNT] + desc.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    return reinterpret(memory, memory.dtype, shape, desc.layout).index(INDEX)


@gluon.jit
def epilogue(tensors, seq, tile, first_key, first_column, dv_buffer, dk_buffer, dk, dv):
    """Store 64 rows of both gradients by TMA, from a key and a column on."""
    as_matrix(dv_buffer, dv.shape[0], dv.shape[1]).store(dv)
    as_matrix(dk_buffer, dk.shape[0], dk.shape[1]).store(dk)
    fence_async_shared()
    coords = seq.outer_coords(tile.batch, tile.head, first_key, first_column)
    async_store(tensors.dv, coords, dv_buffer)
    async_store(tensors.dk, coords, dk_buffer)
    tma.store_wait(0)


@gluon.jit
def store_tail(desc, seq, tile, first_key, buffer, x, HEAD_DIM: gl.constexpr):
    """Store 64 rows of a gradient's tail by TMA. `epilogue` waits for it."""
    as_matrix(buffer, x.shape[0], x.shape[1]).store(x)
    fence_async_shared()
    async_store(desc, seq.outer_coords(tile.batch, tile.head, first_key, HEAD_DIM), buffer)
