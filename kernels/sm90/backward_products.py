"""Products of the backward's consumer warp groups that have 64 keys each, and how they hand over dQ.

q, k, dQ and dK may have a tail, a second tile of K_TAIL columns; dout, v and dV one of V_TAIL. A product with a tail is
issued after that with the HEAD_DIM columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..versions import reinterpret
from .lib import named_barriers
from .lib.mma import WG_ROWS, accumulator, as_matrix


@gluon.jit
def start_s(memory, n, zero, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue Sᵀ of a warp group's keys and the n-th tile of q. zero: an `opaque_zero`."""
    KEYS: gl.constexpr = memory.ds.shape[1]
    TILE_Q: gl.constexpr = memory.ds.shape[2]
    zeros = gl.zeros([WG_ROWS, TILE_Q], gl.float32, accumulator(TILE_Q))
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0)
    q_tile = as_matrix(memory.q.buffer(n), TILE_Q, HEAD_DIM)
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if memory.K_TAIL > 0:
        k_tile = as_matrix(memory.k_tail.index(zero), KEYS, memory.K_TAIL).slice(CONSUMER * WG_ROWS, WG_ROWS, dim=0)
        q_tile = as_matrix(memory.q_tail.index(memory.q.stage(n)), TILE_Q, memory.K_TAIL)
        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_dp(memory, n, zero, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue dPᵀ of a warp group's keys and the n-th tile of dout."""
    TILE_Q: gl.constexpr = memory.ds.shape[2]
    zeros = gl.zeros([WG_ROWS, TILE_Q], gl.float32, accumulator(TILE_Q))
    v_tile = as_matrix(memory.v.index(zero + CONSUMER), WG_ROWS, HEAD_DIM)
    dout_tile = as_matrix(memory.dout.buffer(n), TILE_Q, HEAD_DIM)
    dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    if memory.V_TAIL > 0:
        v_tile = as_matrix(memory.v_tail.index(zero + CONSUMER), WG_ROWS, memory.V_TAIL)
        dout_tile = as_matrix(memory.dout_tail.index(memory.dout.stage(n)), TILE_Q, memory.V_TAIL)
        dp = warpgroup_mma(v_tile, dout_tile.permute((1, 0)), dp, is_async=True)
    return dp


@gluon.jit
def no_sums(TAIL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeros for dK or dV and its tail, a number where that has no columns."""
    total = gl.zeros([WG_ROWS, HEAD_DIM], gl.float32, accumulator(HEAD_DIM))
    tail = gl.to_tensor(0)
    if TAIL > 0:
        tail = gl.zeros([WG_ROWS, TAIL], gl.float32, accumulator(TAIL))
    return total, tail


@gluon.jit
def start_products(operand, pipeline, tails, sums, n, TAIL: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue the product of an operand in registers with the n-th tile of a pipeline, and that with its tail."""
    TILE_Q: gl.constexpr = operand.shape[1]
    total, tail = sums
    total = warpgroup_mma(operand, as_matrix(pipeline.buffer(n), TILE_Q, HEAD_DIM), total, is_async=True)
    if TAIL > 0:
        layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(TAIL), 2)
        tile = as_matrix(tails.index(pipeline.stage(n)), TILE_Q, TAIL)
        tail = warpgroup_mma(gl.convert_layout(operand, layout, assert_trivial=True), tile, tail, is_async=True)
    return total, tail


@gluon.jit
def finished(sums, others, LEFT: gl.constexpr, TAIL: gl.constexpr):
    """What `start_products` issued, and the last of others, after a single wait until LEFT products are left.

    others: a list of its operand, and of what else is waited for.
    """
    total, tail = sums
    if TAIL > 0:
        others = [tail] + others  # noqa: RUF005 - Gluon knows no starred lists
    done = warpgroup_mma_wait(LEFT, [total] + others)  # noqa: RUF005
    if TAIL > 0:
        tail = done[1]
    return (done[0], tail), done[-1]


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
def start_part_of_dq(memory, n, zero, CONSUMER: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Issue a warp group's part of a dQ tile: half of it, or the HEAD_DIM columns or the tail.

    Half of both for each would read dS from shared memory twice as often, which takes longer than the products.
    """
    KEYS: gl.constexpr = memory.ds.shape[1]
    ds_tile = memory.ds.index(n + zero & 1)
    k_tile = as_matrix(memory.k.index(zero), KEYS, HEAD_DIM)
    if memory.K_TAIL == 0:
        dq = start_dq(ds_tile, k_tile, CONSUMER, memory.ds.shape[2])
    else:
        if CONSUMER == 1:
            k_tile = as_matrix(memory.k_tail.index(zero), KEYS, memory.K_TAIL)
        COLUMNS: gl.constexpr = k_tile.shape[1]
        zeros = gl.zeros([WG_ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
        dq = warpgroup_mma(ds_tile.permute((1, 0)), k_tile, zeros, use_acc=False, is_async=True)
    return dq


@gluon.jit
def first_dq_buffer(memory, CONSUMER: gl.constexpr):
    """The two adjacent pieces of a dQ tile with a warp group's half of the HEAD_DIM columns."""
    pieces = memory.p_or_dq
    shape: gl.constexpr = [pieces.shape[0] // 2, 2 * pieces.shape[1], pieces.shape[2]]
    return reinterpret(pieces, pieces.dtype, shape, pieces.layout).index(CONSUMER)


@gluon.jit
def hand_over_part(dq, memory, CONSUMER: gl.constexpr):
    """Hand over what `start_part_of_dq` issued, in the buffers of its columns."""
    if memory.K_TAIL == 0:
        buffer = memory.p_or_dq.index(CONSUMER)
    elif CONSUMER == 0:
        buffer = first_dq_buffer(memory, 0)
    else:
        buffer = memory.p_or_dq.index(2)
    hand_over(dq, buffer, named_barriers.DQ_FULL + CONSUMER)


@gluon.jit
def wait_until_empty(CONSUMER: gl.constexpr):
    """Wait until `dq_reducer` has read what a warp group handed over in the step before."""
    named_barriers.sync(named_barriers.DQ_EMPTY + CONSUMER, named_barriers.WARP_GROUP + named_barriers.WARP)


@gluon.jit
def hand_over(dq, buffer, FULL: gl.constexpr):
    """Store a warp group's part of a dQ tile for `dq_reducer`, in the order of accumulator fragments.

    FULL: the number of the named barrier that tells it.
    """
    THREADS: gl.constexpr = named_barriers.WARP_GROUP + named_barriers.WARP
    COLUMNS: gl.constexpr = dq.shape[1]
    # Four warps, two rows eight apart, eight rows; columns by eights, four threads, two in a row.
    fragments = gl.permute(gl.reshape(dq, [4, 2, 8, COLUMNS // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    buffer.store(gl.reshape(fragments, [buffer.shape[0], buffer.shape[1]]))
    fence_async_shared()
    named_barriers.arrive(FULL, THREADS)
