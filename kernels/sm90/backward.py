"""FlashAttention backward with warps that have roles, for tiles of keys, one after the other; dQ is added up in memory.

K and V of the tile stay in shared memory; tiles of q and dout, with numbers for each of their rows, come through rings.
Each of two warp groups owns 64 keys; what it does with a tile of q and dout is in `backward_step`.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..versions import async_store, barrier, reinterpret
from . import named
from .backward_copying import Memory, add_up, copy_ahead
from .backward_step import is_over_waited_for, step
from .packing import new_packing
from .queue import NONE, new_queue
from .ring import NamedRing, new_barriers, new_tiles
from .schedule import Schedule
from .softmax import Exponents
from .tiles import GROUP, as_matrix

NUMBERS = ("matrices", "heads", "group", "q_len", "k_len", "padded", "left", "right", "section", "sequences")
"""Arguments that one compiled kernel takes any values of."""


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
    barrier()
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
            sums += gl.to_tensor(padded).to(gl.int64) * HEAD_DIM
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
        # Until nobody reads slopes, which leave room for dK.
        named.meet(named.MET, named.BOTH)
        store_gradients(
            dk_desc, dv_desc, own, work, first_column, 0,
            memory.v.index(MEMBER), room_in(memory.slopes, dk_desc, MEMBER), (dk * scale).to(dtype), dv.to(dtype),
        )  # fmt: skip
        mbarrier.arrive(memory.v_read, count=1)
        turn += 1
        kind, batch, head, first_row = memory.queue.hear(turn, 4)


@gluon.constexpr_function
def tiles_in(numbers, block_shape):
    """How many tiles of a shape so many numbers are."""
    return numbers // math.prod(block_shape)


@gluon.jit
def room_in(memory, desc, NUMBER: gl.constexpr):
    """The ``NUMBER``-th part of shared memory that has room for a tile of what is described."""
    TIMES: gl.constexpr = tiles_in(memory.numel, desc.block_shape)
    shape: gl.constexpr = [TIMES] + desc.block_shape  # noqa: RUF005 - Gluon knows no starred lists
    return reinterpret(memory, memory.dtype, shape, desc.layout).index(NUMBER)


@gluon.jit
def store_gradients(dk_desc, dv_desc, own, work, first_row, first_column, room_of_dv, room_of_dk, dk, dv):
    """Write 64 rows of so many columns, which need not all exist, of both gradients, through shared memory."""
    as_matrix(room_of_dv, dv.shape[0], dv.shape[1]).store(dv)
    as_matrix(room_of_dk, dk.shape[0], dk.shape[1]).store(dk)
    fence_async_shared()
    corner = own.q_corner(work.batch, work.head, first_row, first_column)
    async_store(dv_desc, corner, room_of_dv)
    async_store(dk_desc, corner, room_of_dk)
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
    TILE_Q: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    CAPPED: gl.constexpr,
    TO_THE_END: gl.constexpr,
    PERSISTENT: gl.constexpr,
    IN_ORDER: gl.constexpr,
    TURNED: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid: as many programs as the GPU runs at once, or fewer: one for each tile of keys, 64 for each of two groups.

    ``matrices`` and ``heads`` are k's. lse, in exponents of 2, and delta are (matrices of q, padded); ``padded`` is a
    multiple of TILE_Q, and lse is +inf beyond q_len. dq_desc describes the sums (matrices of q, padded, HEAD_DIM), laid
    out as `hand_over` does, as rows of 32 numbers. IN_ORDER: whether they are added up in a fixed order, for which
    ``added`` counts how many have added to the sums of every 64 rows. For packed sequences see `packing`.
    For TURNED see `Schedule.in_place_of`: sums in a fixed order are not. ``exponent_scale`` and ``steepness`` make
    `Exponents`.
    """
    # Of a key at column c the rows c - right to c - left see it: the same schedule with the roles exchanged.
    packing = new_packing(k_starts, q_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, k_len, q_len, -right, -left, section, packing, 2 * GROUP, TILE_Q, RIGHT, LEFT
    )  # fmt: skip
    exponents = Exponents(exponent_scale, steepness, CAPPED)
    dtype: gl.constexpr = q_desc.dtype
    slopes_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * GROUP, TILE_Q], dtype)
    k_read = new_barriers(1, 2).index(0)
    over = k_read
    if is_over_waited_for(TILE_Q, CAPPED):
        over = new_barriers(1, 1).index(0)
    memory = Memory(
        new_queue(3, packing.PACKED), new_tiles(k_desc, 1), new_tiles(v_desc, 2),
        k_read, new_barriers(1, 2).index(0), over,
        NamedRing(new_tiles(q_desc, STAGES), new_barriers(STAGES, 1), named.Q_FREE, named.BOTH, STAGES),
        NamedRing(new_tiles(dout_desc, STAGES), new_barriers(STAGES, 1), named.DOUT_FREE, named.BOTH, STAGES),
        new_tiles(lse_desc, STAGES), new_tiles(delta_desc, STAGES),
        gl.allocate_shared_memory(dtype, [2, 2 * GROUP, TILE_Q], slopes_layout), new_tiles(dq_desc, 2),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([
        (compute, (
            0, dk_desc, dv_desc, memory, schedule, group, scale, exponents, HEAD_DIM, TILE_Q,
        )),
        (compute, (
            1, dk_desc, dv_desc, memory, schedule, group, scale, exponents, HEAD_DIM, TILE_Q,
        )),
        (copy_ahead, (
            (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc), counter, memory, schedule, group,
            HEAD_DIM, TILE_Q, PERSISTENT, TURNED and not IN_ORDER,
        )),
        (add_up, (
            dq_desc, added, memory, schedule, group, padded, HEAD_DIM, TILE_Q, IN_ORDER, TURNED and not IN_ORDER,
        )),
    ], [4, 1, 1], [REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
