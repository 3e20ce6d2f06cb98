"""The backward's consumer warp groups for head dimensions up to 128, each with 64 keys.

Each computes transposed scores Sᵀ = k qᵀ of its keys, so that P and dS are A operands in registers for dV and dK. For
dQ the dS of all keys meets in shared memory; each warp group computes a part of a dQ tile, which `dq_reducer` adds up.
Heads of 72 to 96 columns are 64 columns and a tail, of v only if it has more than 64 (`backward_products`).
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ..lib.rules import is_singular
from ..versions import async_store, reinterpret
from .backward_mainloop import mainloop
from .backward_products import (
    finished,
    hand_over_part,
    no_sums,
    start_dp,
    start_part_of_dq,
    start_products,
    start_s,
    wait_until_empty,
)
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix, opaque_zero, pack_pairs, unpack_operand
from .lib.mods import ZERO, Pairs, opaque, selected
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
    if is_singular(mods.SCORE):
        # For rows that do not exist.
        p = gl.where(lse2 == float("inf"), 0.0, p)
    if MASKED:
        seen = visible(keys, first_row, seq, layout, ROWS)
        if seq.RIGHT or mods.MASK is not None:
            p = selected(p, mods.restrict(seen, pairs), ZERO)
        else:
            # With a causal mask alone this was measured to be a little faster, in spite of more instructions.
            p = gl.where(seen, p, 0.0)
    return p, slope


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
    p = mods.chained(p, slope)
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
    """Add what the n-th tile of q and dout contributes to dK, dV and dQ. ``dq`` is not used.

    dk, dv: each with its tail (`no_sums`).
    """
    DP_PRODUCTS: gl.constexpr = 2 if memory.V_TAIL > 0 else 1
    DK_PRODUCTS: gl.constexpr = 2 if memory.K_TAIL > 0 else 1
    inner = seq.visited(position, tile)
    zero = opaque_zero(n)
    memory.q.wait_full(n)
    s = start_s(memory, n, zero, CONSUMER, HEAD_DIM)
    lse2 = early_lse2(memory, n, seq.INNER_TILE)
    memory.dout.wait_full(n)
    dp = start_dp(memory, n, zero, CONSUMER, HEAD_DIM)
    p_operand, ds = finish_scores(
        s, dp, lse2, memory, seq, tile, head, keys, n, inner, scores, mods, DP_PRODUCTS, MASKED, CONSUMER, HEAD_DIM
    )  # fmt: skip
    zero = opaque_zero(n)
    # Issued before dS, this would stall the warps until the tensor cores had read all of P from their registers.
    dv = start_products(p_operand, memory.dout, memory.dout_tail, dv, n, memory.V_TAIL, HEAD_DIM)
    fence_async_shared()
    named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
    if memory.pair_pipeline.stages < memory.q.stages:
        # What dS was computed of has been read.
        memory.pair_pipeline.release(n)
    dq = start_part_of_dq(memory, n, zero, CONSUMER, HEAD_DIM)
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator(HEAD_DIM), 2))
    dk = start_products(ds_operand, memory.q, memory.q_tail, dk, n + zero, memory.K_TAIL, HEAD_DIM)
    # dQ is handed over while the tensor cores compute dK.
    dv, dq = finished(dv, [p_operand, dq], DK_PRODUCTS, memory.V_TAIL)
    memory.dout.release(n)
    wait_until_empty(CONSUMER)
    hand_over_part(dq, memory, CONSUMER)
    dk, _ = finished(dk, [ds_operand], 0, memory.K_TAIL)
    memory.q.release(n)
    return dk, dv


@gluon.jit
def consumer(
    CONSUMER: gl.constexpr, tensors, memory, tile_map, heads_per_kv, scale, scores, mods, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: dK and dV of its 64 keys of each tile, and a part of every dQ tile."""
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = accumulator(tile_map.INNER_TILE)
    n = 0
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 4)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 4)
        tile = seq.tile(batch, head, start)
        dk, dv = no_sums(tensors.K_TAIL, HEAD_DIM), no_sums(tensors.V_TAIL, HEAD_DIM)
        first_key = tile.start + CONSUMER * WG_ROWS
        keys = first_key + gl.arange(0, WG_ROWS, layout=gl.SliceLayout(1, layout))
        dk, dv, n = mainloop(
            step, dk, dv, memory, tile, seq, keys, n, heads_per_kv, None, None, scores, mods, CONSUMER, HEAD_DIM
        )  # fmt: skip
        dk, dk_tail = dk
        dv, dv_tail = dv
        dv = mods.dropout.scale(dv)
        mbarrier.arrive(memory.k_empty, count=1)
        # Until no consumer reads dS, whose buffers store dK and, behind that of both consumers, its tail.
        named_barriers.sync(named_barriers.DS_WRITTEN, named_barriers.CONSUMERS)
        if tensors.K_TAIL > 0:
            dk_buffer = buffer_in(memory.ds, tensors.dk_tail, 2 * HEAD_DIM // tensors.K_TAIL + CONSUMER)
            store_tail(tensors.dk_tail, seq, tile, first_key, dk_buffer, (dk_tail * scale).to(dtype), HEAD_DIM)
        if tensors.V_TAIL > 0:
            dv_tail = mods.dropout.scale(dv_tail).to(dtype)
            store_tail(tensors.dv_tail, seq, tile, first_key, memory.v_tail.index(CONSUMER), dv_tail, HEAD_DIM)
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
def store_tail(desc, seq, tile, first_key, buffer, x, first_column):
    """Store 64 rows of a gradient's tail by TMA, from a column on. `epilogue` waits for it."""
    as_matrix(buffer, x.shape[0], x.shape[1]).store(x)
    fence_async_shared()
    async_store(desc, seq.outer_coords(tile.batch, tile.head, first_key, first_column), buffer)
