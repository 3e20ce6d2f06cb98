"""FlashAttention forward with warps that have roles, after FlashAttention-3 (Shah et al., 2024).

One warp copies tiles of q, k and v into shared memory, ahead of those that compute. Each of up to three warp groups has
64 rows of q. It issues the product of q with the next keys before that of the weights with the values of this
step, and computes the next weights while the tensor cores still work on the latter.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from ..versions import async_store
from .copying import Memory, copy_ahead, new_rings
from .packing import new_packing
from .products import add_values, finished, scores_of
from .queue import CAREFUL, NONE, new_queue, new_verdicts
from .ring import new_tiles
from .schedule import Schedule
from .softmax import Exponents, first_fold
from .tiles import GROUP, as_matrix, packed

NUMBERS = ("matrices", "heads", "group", "q_len", "k_len", "left", "right", "section", "sequences")
"""Arguments that one compiled kernel takes any values of."""


@gluon.jit
def visible(rows, first_column, schedule, layout: gl.constexpr):
    """Which pairs of the rows (64,) and a tile of columns exist and are seen.

    Places of columns are compared in two parts: a thread's are few numbers below 8, and multiples of 8 known
    beforehand.
    """
    columns = gl.arange(0, schedule.TILE_K, layout=gl.SliceLayout(0, layout))[None, :]
    last = gl.full([GROUP], 0, gl.int32, gl.SliceLayout(1, layout)) + (schedule.k_len - 1)
    if schedule.RIGHT:
        last = gl.minimum(rows + schedule.right, last)
    seen = (last - first_column)[:, None] - columns % 8 >= columns // 8 * 8
    if schedule.LEFT:
        seen = seen & ((rows + (schedule.left - first_column))[:, None] - columns % 8 <= columns // 8 * 8)
    return seen


@gluon.jit
def step(
    softmax, weights, out, out_more, memory, schedule, rows, number, tile, more, exponents,
    FOLD: gl.constexpr, MASKED: gl.constexpr, MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Begin with a tile of keys, and finish what the tile before left: its weights, not yet multiplied by values.

    The tile of keys is known to have arrived; ``more`` says whether another follows. FOLD: see `Softmax`.
    """
    TILE_K: gl.constexpr = schedule.TILE_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    PRODUCTS: gl.constexpr = 1 if memory.VALUE_MORE == 0 else 2
    pending = scores_of(memory, number, layout, MEMBER, HEAD_DIM, TILE_K)
    memory.v.wait_full(number - 1)
    out, out_more, operand = add_values(weights, out, out_more, memory, number - 1, HEAD_DIM, TILE_K)
    scores = exponents.cap(warpgroup_mma_wait(PRODUCTS, [pending]))
    if MASKED:
        scores = gl.where(visible(rows, tile * TILE_K, schedule, layout), scores, float("-inf"))
    if FOLD:
        softmax, exact, rescale = softmax.fold(scores, exponents.scale)
    else:
        softmax, exact = softmax.add(scores, exponents.scale)
    # Also a boundary: without one, the assembler moves the wait for the product below above the exponentials.
    memory.k.wait_full(number + 1, more)
    out, out_more = finished(out, out_more, operand, memory.VALUE_MORE)
    memory.k.release(number)
    if FOLD:
        out = out * gl.convert_layout(rescale, gl.SliceLayout(1, out.type.layout))[:, None]
        if memory.VALUE_MORE > 0:
            out_more = out_more * gl.convert_layout(rescale, gl.SliceLayout(1, out_more.type.layout))[:, None]
    return softmax, packed(exact, memory.k.tiles.dtype), out, out_more


@gluon.jit
def attend(
    memory, schedule, work, rows, number, careful, exponents,
    MEMBER: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """64 rows over all their tiles of keys: softmax, weights, output before normalising, last number, if any was added.

    ``careful``: folding every tile, and never adding.
    """
    TILE_K: gl.constexpr = schedule.TILE_K
    dtype: gl.constexpr = memory.k.tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    memory.k.wait_full(number)
    scores = scores_of(memory, number, layout, MEMBER, HEAD_DIM, TILE_K)
    scores = exponents.cap(warpgroup_mma_wait(0, [scores]))
    memory.k.release(number)
    tile = work.end - 1
    if schedule.RIGHT:  # noqa: SIM114 - known when compiled, and then no branch
        scores = gl.where(visible(rows, tile * TILE_K, schedule, layout), scores, float("-inf"))
    elif (work.whole_begin > tile) | schedule.is_cut_short(work):
        scores = gl.where(visible(rows, tile * TILE_K, schedule, layout), scores, float("-inf"))
    softmax, exact = first_fold(scores, exponents.scale)
    weights = packed(exact, dtype)
    out = gl.zeros([GROUP, HEAD_DIM], gl.float32, out_layout)
    out_more = number * 0
    if memory.VALUE_MORE > 0:
        more_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, memory.VALUE_MORE, 16])
        out_more = gl.zeros([GROUP, memory.VALUE_MORE], gl.float32, more_layout)
    memory.k.wait_full(number + 1, work.begin < tile)
    right = gl.maximum(gl.minimum(work.whole_end, tile), work.begin)
    left = gl.maximum(gl.minimum(work.whole_begin, right), work.begin)
    added_to = left
    if careful:
        added_to = right
    for tile in range(work.end - 2, right - 1, -1):
        number += 1
        softmax, weights, out, out_more = step(
            softmax, weights, out, out_more, memory, schedule, rows, number, tile, tile > work.begin, exponents,
            True, True, MEMBER, HEAD_DIM,
        )  # fmt: skip
    for tile in range(right - 1, added_to - 1, -1):
        number += 1
        softmax, weights, out, out_more = step(
            softmax, weights, out, out_more, memory, schedule, rows, number, tile, tile > work.begin, exponents,
            False, False, MEMBER, HEAD_DIM,
        )  # fmt: skip
    for tile in range(added_to - 1, work.begin - 1, -1):
        number += 1
        softmax, weights, out, out_more = step(
            softmax, weights, out, out_more, memory, schedule, rows, number, tile, tile > work.begin, exponents,
            True, schedule.LEFT, MEMBER, HEAD_DIM,
        )  # fmt: skip
    return softmax, weights, out, out_more, number, right > added_to


@gluon.jit
def compute(
    MEMBER: gl.constexpr, out_desc, out_more_desc, lse_ptr, memory, schedule, exponents,
    HEAD_DIM: gl.constexpr, OWN_ROOM: gl.constexpr,
):  # fmt: skip
    """A computing warp group: attention of its 64 rows of each tile."""
    TILE_K: gl.constexpr = schedule.TILE_K
    dtype: gl.constexpr = memory.k.tiles.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    number = 0
    turn = 0
    kind, batch, head, tile_row = memory.queue.hear(turn, 4)
    while kind != NONE:
        careful = kind == CAREFUL
        own = memory.queue.sequence(turn, schedule, 4)
        work = own.work_of(batch, head, tile_row)
        first_row = work.first_row + MEMBER * GROUP
        rows = first_row + gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
        memory.q.wait_full(turn)
        softmax, weights, out, out_more, number, added = attend(
            memory, own, work, rows, number, careful, exponents, MEMBER, HEAD_DIM
        )  # fmt: skip
        if OWN_ROOM:
            memory.q.release(turn)
        memory.v.wait_full(number)
        out, out_more, operand = add_values(weights, out, out_more, memory, number, HEAD_DIM, TILE_K)
        out, out_more = finished(out, out_more, operand, memory.VALUE_MORE)
        number += 1
        certain = softmax.is_certain(out, added, exponents.scale)
        if memory.VALUE_MORE > 0:
            certain = certain & softmax.is_certain(out_more, added, exponents.scale)
        certain = certain | careful
        normaliser, row_lse = softmax.normaliser_and_lse(exponents.scale)
        out *= gl.convert_layout(normaliser, gl.SliceLayout(1, out_layout))[:, None]
        gl.store(schedule.row_numbers(lse_ptr, work, own) + rows, row_lse, mask=rows < own.q_len)
        tma.store_wait(0)
        room = memory.out.index(MEMBER)
        as_matrix(room, GROUP, HEAD_DIM).store(out.to(dtype))
        if memory.VALUE_MORE > 0:
            out_more *= gl.convert_layout(normaliser, gl.SliceLayout(1, out_more.type.layout))[:, None]
            room_of_more = memory.out_more.index(MEMBER)
            as_matrix(room_of_more, GROUP, memory.VALUE_MORE).store(out_more.to(dtype))
        fence_async_shared()
        async_store(out_desc, own.q_corner(work.batch, work.head, first_row, 0), room)
        if memory.VALUE_MORE > 0:
            corner_of_more = own.q_corner(work.batch, work.head, first_row, HEAD_DIM)
            async_store(out_more_desc, corner_of_more, room_of_more)
        if not OWN_ROOM:
            tma.store_wait(0)
            memory.q.release(turn)
        if not careful:
            memory.verdicts.judge(turn, MEMBER, 1 - certain.to(gl.int32))
        turn += 1
        kind, batch, head, tile_row = memory.queue.hear(turn, 4)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=NUMBERS)
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse,
    counter,
    q_starts,
    k_starts,
    matrices,
    heads,
    group,
    q_len,
    k_len,
    left,
    right,
    section,
    scale,
    steepness,
    sequences,
    HEAD_DIM: gl.constexpr,
    TILE_K: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    CAPPED: gl.constexpr,
    TO_THE_END: gl.constexpr,
    OWN_ROOM: gl.constexpr,
    PERSISTENT: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: as many programs as the GPU runs at once, or fewer. See `Exponents` and `packing`."""
    exponents = Exponents(scale, steepness, CAPPED)
    packing = new_packing(q_starts, k_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, q_len, k_len, left, right, section, packing, GROUPS * GROUP, TILE_K, LEFT, RIGHT
    )  # fmt: skip
    q_ring, k_ring, v_ring = new_rings(q_desc, k_desc, v_desc, GROUPS, STAGES)
    room = q_ring.tiles
    if OWN_ROOM:
        room = new_tiles(q_desc, GROUPS)
    queue = new_queue(GROUPS, packing.PACKED)
    verdicts = new_verdicts(GROUPS)
    fence_async_shared()
    memory = Memory(
        q_ring, k_ring, v_ring, room, queue, verdicts, q_ring.tiles, k_ring.tiles, v_ring.tiles, room, 0, 0,
    )  # fmt: skip
    if GROUPS == 1:
        gl.warp_specialize([
            (compute, (0, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (copy_ahead, (
                (q_desc, k_desc, v_desc, q_desc, k_desc, v_desc), lse, counter, memory, schedule, group,
                HEAD_DIM, GROUPS, PERSISTENT,
            )),
        ], [1], [COPY_REGISTERS])  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize([
            (compute, (0, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (compute, (1, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (copy_ahead, (
                (q_desc, k_desc, v_desc, q_desc, k_desc, v_desc), lse, counter, memory, schedule, group,
                HEAD_DIM, GROUPS, PERSISTENT,
            )),
        ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (0, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (compute, (1, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (compute, (2, out_desc, out_desc, lse, memory, schedule, exponents, HEAD_DIM, OWN_ROOM)),
            (copy_ahead, (
                (q_desc, k_desc, v_desc, q_desc, k_desc, v_desc), lse, counter, memory, schedule, group,
                HEAD_DIM, GROUPS, PERSISTENT,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, COPY_REGISTERS])  # fmt: skip
