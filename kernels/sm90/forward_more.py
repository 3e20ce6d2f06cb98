"""The forward for heads of one tile's columns and some more: 80 as 64 + 16, 96 as 64 + 32, 192 as 128 + 64."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .copying import Memory, copy_ahead, new_rings
from .forward import NUMBERS, compute
from .packing import new_packing
from .queue import new_queue, new_verdicts
from .ring import new_tiles
from .schedule import Schedule
from .softmax import Exponents
from .tiles import GROUP


@gluon.jit(do_not_specialize=NUMBERS)
def forward_more_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    q_more_desc,
    k_more_desc,
    v_more_desc,
    out_more_desc,
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
    KEY_MORE: gl.constexpr,
    VALUE_MORE: gl.constexpr,
    TILE_K: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    CAPPED: gl.constexpr,
    TO_THE_END: gl.constexpr,
    PERSISTENT: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Grid and arguments as of `forward_kernel`, with one or two groups. VALUE_MORE may be 0, with any descriptors."""
    exponents = Exponents(scale, steepness, CAPPED)
    packing = new_packing(q_starts, k_starts, sequences, TO_THE_END)
    schedule = Schedule(
        matrices, heads, q_len, k_len, left, right, section, packing, GROUPS * GROUP, TILE_K, LEFT, RIGHT
    )  # fmt: skip
    q_ring, k_ring, v_ring = new_rings(q_desc, k_desc, v_desc, GROUPS, STAGES)
    room = new_tiles(out_desc, GROUPS)
    v_more = v_ring.tiles
    out_more = room
    if VALUE_MORE > 0:
        v_more = new_tiles(v_more_desc, STAGES)
        out_more = new_tiles(out_more_desc, GROUPS)
    queue = new_queue(GROUPS, packing.PACKED)
    verdicts = new_verdicts(GROUPS)
    memory = Memory(
        q_ring, k_ring, v_ring, room, queue, verdicts,
        new_tiles(q_more_desc, GROUPS), new_tiles(k_more_desc, STAGES), v_more, out_more, KEY_MORE, VALUE_MORE,
    )  # fmt: skip
    fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize([
            (compute, (0, out_desc, out_more_desc, lse, memory, schedule, exponents, HEAD_DIM, True)),
            (copy_ahead, (
                (q_desc, k_desc, v_desc, q_more_desc, k_more_desc, v_more_desc), lse, counter, memory, schedule, group,
                HEAD_DIM, GROUPS, PERSISTENT,
            )),
        ], [1], [COPY_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (compute, (0, out_desc, out_more_desc, lse, memory, schedule, exponents, HEAD_DIM, True)),
            (compute, (1, out_desc, out_more_desc, lse, memory, schedule, exponents, HEAD_DIM, True)),
            (copy_ahead, (
                (q_desc, k_desc, v_desc, q_more_desc, k_more_desc, v_more_desc), lse, counter, memory, schedule, group,
                HEAD_DIM, GROUPS, PERSISTENT,
            )),
        ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip
