"""FlashAttention backward with warps that have roles: one program for each tile of keys, dQ added up in global memory.

K and V of the tile stay in shared memory; tiles of q and dout, with numbers for each of their rows, come through rings.
Each of one or two warp groups owns 64 keys and computes with the transposed scores, so that the weights and their
gradients are left operands in registers for dV and dK. For dQ the gradients of all keys have to meet in shared memory;
each group then computes its part of a tile of dQ, which a warp of its own adds to a float32 buffer.
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

from . import named
from .backward_copying import Memory, add_up, copy_ahead
from .packing import new_packing
from .queue import NONE, new_queue
from .ring import NamedRing, new_barriers, new_tiles
from .schedule import Schedule
from .softmax import Exponents
from .tiles import GROUP, as_matrix
from .versions import meet_in_group

NUMBERS = ("matrices", "heads", "group", "q_len", "k_len", "padded", "left", "right", "section", "sequences")
"""Arguments that one compiled kernel takes any values of."""


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
    weights = gl.exp2(scores * exponents.scale - lse)
    if EARLY:
        delta = memory.delta.index(stage).load(layout)
    if MASKED:
        weights = gl.where(visible(columns, tile * TILE_Q, schedule, layout, TILE_Q), weights, 0.0)
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
    # Begun before, this would hold the warps up until the tensor cores had read all its weights from their registers.
    dv = warpgroup_mma(operand_of_dv, dout_tile, dv, is_async=True)
    fence_async_shared()
    if KEYS > GROUP:
        named.meet(named.MET, KEYS // GROUP * named.GROUP)
    dq = slopes_product(slopes_tile, k_tile, MEMBER, HEAD_DIM, TILE_Q)
    operand_of_dk = gl.convert_layout(slopes, operand)
    dk = warpgroup_mma(operand_of_dk, q_tile, dk, is_async=True)
    # dQ is handed over while the tensor cores compute the product for dK.
    dq, dv, _ = warpgroup_mma_wait(1, [dq, dv, operand_of_dv])
    memory.dout.release(number)
    hand_over(dq, memory.more.index(MEMBER), MEMBER)
    dk, _ = warpgroup_mma_wait(0, [dk, operand_of_dk])
    memory.q.release(number)
    return dk, dv


@gluon.jit
def over_tiles(
    STEP: gl.constexpr, dk, dv, memory, work, own, columns, number, group, padded, sums, exponents,
    MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """dK and dV after a `step` for each tile of q and dout that sees the keys, of each query head of the group.

    And the number after that of the last; ``number`` is that of the first. ``sums`` is where the warp group adds its
    part of dQ of the first head, if it does that itself.
    """
    if sums is not None and own.packing.PACKED:
        sums += own.first_filled_up().to(gl.int64) * HEAD_DIM
    left, right = own.whole_tiles(work)
    # Else Triton lets the warps meet before the first wait of every step.
    meet_in_group()
    for _ in range(own.visits(group)):
        for tile in range(work.begin, left):
            dk, dv = STEP(
                dk, dv, memory, own, columns, number, tile, sums, exponents,
                True, MEMBER, HEAD_DIM, TILE_Q,
            )  # fmt: skip
            number += 1
        for tile in range(left, right):
            dk, dv = STEP(
                dk, dv, memory, own, columns, number, tile, sums, exponents,
                False, MEMBER, HEAD_DIM, TILE_Q,
            )  # fmt: skip
            number += 1
        for tile in range(right, work.end):
            dk, dv = STEP(
                dk, dv, memory, own, columns, number, tile, sums, exponents,
                True, MEMBER, HEAD_DIM, TILE_Q,
            )  # fmt: skip
            number += 1
        if sums is not None:
            sums += padded * HEAD_DIM
    return dk, dv, number


@gluon.jit
def compute(
    MEMBER: gl.constexpr, dk_desc, dv_desc, memory, schedule, group, scale, exponents,
    HEAD_DIM: gl.constexpr, TILE_Q: gl.constexpr,
):  # fmt: skip
    """A computing warp group: dK and dV of its 64 keys, and its part of every tile of dQ."""
    dtype: gl.constexpr = memory.k.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_Q, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    KEYS: gl.constexpr = schedule.TILE_Q
    number = 0
    turn = 0
    kind, batch, head, first_row = memory.queue.hear(turn, 4)
    while kind != NONE:
        own = memory.queue.sequence(turn, schedule, 4)
        work = own.work_of(batch, head, first_row)
        dk = gl.zeros([GROUP, HEAD_DIM], gl.float32, wide)
        dv = gl.zeros([GROUP, HEAD_DIM], gl.float32, wide)
        first_column = work.first_row + MEMBER * GROUP
        columns = first_column + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
        dk, dv, number = over_tiles(
            step, dk, dv, memory, work, own, columns, number, group, None, None, exponents,
            MEMBER, HEAD_DIM, TILE_Q,
        )  # fmt: skip
        mbarrier.arrive(memory.k_read, count=1)
        if KEYS > GROUP:
            # Until nobody reads slopes, which leave room for dK.
            named.meet(named.MET, KEYS // GROUP * named.GROUP)
        store_gradients(
            dk_desc, dv_desc, own, work, first_column, 0,
            memory.v.index(MEMBER), room_in(memory.slopes, dk_desc, MEMBER), (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        mbarrier.arrive(memory.v_read, count=1)
        turn += 1
        kind, batch, head, first_row = memory.queue.hear(turn, 4)


@gluon.jit
def room_in(memory, desc, NUMBER: gl.constexpr):
    """The ``NUMBER``-th part of shared memory that has room for a tile of what is described."""
    TIMES: gl.constexpr = memory.numel // (desc.block_shape[2] * desc.block_shape[3])
    shape: gl.constexpr = [TIMES] + desc.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    return memory._reinterpret(memory.dtype, shape, desc.layout).index(NUMBER)


@gluon.jit
def store_gradients(dk_desc, dv_desc, own, work, first_row, first_column, room_of_dv, room_of_dk, dk, dv):
    """Write 64 rows of so many columns, which need not all exist, of both gradients, through shared memory."""
    as_matrix(room_of_dv, dv.shape[0], dv.shape[1]).store(dv)
    as_matrix(room_of_dk, dk.shape[0], dk.shape[1]).store(dk)
    fence_async_shared()
    corner = own.q_corner(work.batch, work.head, first_row, first_column)
    tma.async_copy_shared_to_global(dv_desc, corner, room_of_dv)
    tma.async_copy_shared_to_global(dk_desc, corner, room_of_dk)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def backward_kernel(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    lse_desc,
    delta_desc,
    dk_desc,
    dv_desc,
    dq_desc,
    added,
    counter,
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
    GROUPS: gl.constexpr,
    TILE_Q: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    CAPPED: gl.constexpr,
    TO_THE_END: gl.constexpr,
    PERSISTENT: gl.constexpr,
    IN_ORDER: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: as many programs as the GPU runs at once, or fewer: one for each tile of keys, 64 for each group.

    ``matrices`` and ``heads`` are k's. lse, in exponents of 2, and delta are (matrices of q, padded); ``padded`` is a
    multiple of TILE_Q, and lse is +inf beyond q_len. dq_desc describes the sums (matrices of q, padded, HEAD_DIM), laid
    out as `hand_over` does, as rows of 32 numbers. IN_ORDER: whether they are added up in a fixed order, for which
    ``added`` counts how many have added to the sums of every 64 rows. For packed sequences see `packing`.
    ``exponent_scale`` and ``steepness`` make `Exponents`.
    """
    # Of a key at column c the rows c - right to c - left see it: the same schedule with the roles exchanged.
    packing = new_packing(k_starts, q_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, k_len, q_len, -right, -left, section, packing, GROUPS * GROUP, TILE_Q, RIGHT, LEFT
    )  # fmt: skip
    exponents = Exponents(exponent_scale, steepness, CAPPED)
    dtype: gl.constexpr = q_desc.dtype
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUPS * GROUP, TILE_Q], dtype)
    READERS: gl.constexpr = GROUPS * named.GROUP
    memory = Memory(
        new_queue(GROUPS + 1, packing.PACKED), new_tiles(k_desc, 1), new_tiles(v_desc, GROUPS),
        new_barriers(1, GROUPS).index(0), new_barriers(1, GROUPS).index(0),
        NamedRing(new_tiles(q_desc, STAGES), new_barriers(STAGES, 1), named.Q_FREE, READERS, STAGES),
        NamedRing(new_tiles(dout_desc, STAGES), new_barriers(STAGES, 1), named.DOUT_FREE, READERS, STAGES),
        new_tiles(lse_desc, STAGES), new_tiles(delta_desc, STAGES),
        gl.allocate_shared_memory(dtype, [2, GROUPS * GROUP, TILE_Q], slopes_layout), new_tiles(dq_desc, GROUPS),
    )  # fmt: skip
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize([
            (compute, (
                0, dk_desc, dv_desc, memory, schedule, group, scale, exponents, HEAD_DIM, TILE_Q,
            )),
            (copy_ahead, (
                (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), counter, memory, schedule, group,
                HEAD_DIM, TILE_Q, PERSISTENT,
            )),
            (add_up, (dq_desc, added, memory, schedule, group, padded, GROUPS, HEAD_DIM, TILE_Q, IN_ORDER)),
        ], [1, 1], [COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (
                0, dk_desc, dv_desc, memory, schedule, group, scale, exponents, HEAD_DIM, TILE_Q,
            )),
            (compute, (
                1, dk_desc, dv_desc, memory, schedule, group, scale, exponents, HEAD_DIM, TILE_Q,
            )),
            (copy_ahead, (
                (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), counter, memory, schedule, group,
                HEAD_DIM, TILE_Q, PERSISTENT,
            )),
            (add_up, (dq_desc, added, memory, schedule, group, padded, GROUPS, HEAD_DIM, TILE_Q, IN_ORDER)),
        ], [4, 1, 1], [REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
