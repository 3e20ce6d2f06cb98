"""The warp that adds up dQ in the backward up to head dimension 128, and with tails."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..versions import async_atomic_add, async_store
from .lib import named_barriers
from .lib.mma import WG_ROWS
from .lib.scheduler import STOP

DQ_ROW = gl.constexpr(32)
"""Numbers in a row of dQ as its descriptor has it: 128 bytes."""


@gluon.jit
def dq_reducer(
    dq, turns, memory, tile_map, heads_per_kv, padded_len,
    HEAD_DIM: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """The warp that adds each dQ tile from shared memory to global memory by TMA, so that no consumer waits for it.

    Of the CTAs that visit the same rows of q, the first to come stores its dQ tile, so that no zeros have to be there
    before; the others wait until it has. ``turns`` says for each TILE_Q rows how far that is: see `claim`. If
    DETERMINISTIC it counts the CTAs that have finished, and each waits for all whose tiles of keys were claimed before
    its own. Then sums are the same on every run.
    """
    TILE_Q: gl.constexpr = tile_map.INNER_TILE
    DQ_ROWS: gl.constexpr = TILE_Q * HEAD_DIM // DQ_ROW
    THREADS: gl.constexpr = named_barriers.WARP_GROUP + named_barriers.WARP
    turn = 0
    command, batch, head, start = memory.scheduler.pop(turn, 1)
    while command != STOP:
        seq = memory.scheduler.pop_sequence(turn, tile_map, 1)
        tile = seq.tile(batch, head, start)
        for member in range(seq.heads_to_visit(heads_per_kv)):
            rows = (tile.batch_head * heads_per_kv + member) * padded_len + seq.padded_inner_start()
            first = rows * (HEAD_DIM // DQ_ROW)
            outer = tile.start // tile_map.OUTER_TILE
            following = outer + 1
            visits = seq.for_member(tile, member, heads_per_kv)
            for inner in range(visits.begin, visits.end):
                row_tile = seq.visited(inner, visits)
                for half in gl.static_range(2):
                    # The addition of the other half may go on.
                    tma.store_wait(1 - half)
                    named_barriers.arrive(named_barriers.DQ_EMPTY + half, THREADS)
                turn_of_rows = turns + rows // WG_ROWS + row_tile * (TILE_Q // WG_ROWS)
                if DETERMINISTIC:
                    before = outer
                    if tile_map.LAST_FIRST:
                        # Tiles with higher numbers were claimed before: as many of them as reach this tile of q.
                        while seq.reaches(following, row_tile, tile):
                            following += 1
                        before = following - 1 - outer
                    wait_for(turn_of_rows, before)
                    stores = before == 0
                else:
                    stores = claim(turn_of_rows)
                for half in gl.static_range(2):
                    named_barriers.sync(named_barriers.DQ_FULL + half, THREADS)
                    if memory.K_TAIL > 0:
                        # The tail of 64 columns is one piece.
                        for piece in gl.static_range(1 if HEAD_DIM < 2 * WG_ROWS and half == 1 else 2):
                            add_piece(dq, memory, first + row_tile * DQ_ROWS, 2 * half + piece, stores)
                    else:
                        coords = [first + row_tile * DQ_ROWS + half * (DQ_ROWS // 2), 0]
                        add(dq, coords, memory.p_or_dq.index(half), stores)
                if memory.K_TAIL > 0 and HEAD_DIM > 2 * WG_ROWS:
                    for half in gl.static_range(2):
                        named_barriers.sync(named_barriers.DQ_TAIL_FULL + half, THREADS)
                        add_piece(dq, memory, first + row_tile * DQ_ROWS, 4 + half, stores)
                if DETERMINISTIC or stores:
                    finish_additions(turn)
                    gl.atomic_add(turn_of_rows, 1, sem="release")
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 1)
    tma.store_wait(0)


@gluon.jit
def add(dq, coords, buffer, stores):
    """Add a part of a dQ tile, or store it if this CTA ``stores``."""
    if stores:
        async_store(dq, coords, buffer)
    else:
        async_atomic_add(dq, coords, buffer)


@gluon.jit
def add_piece(dq, memory, first, NUMBER: gl.constexpr, stores):
    """Add or store 32 columns of a dQ tile, which begins at a row of its descriptor: see `add`."""
    add(dq, [first + NUMBER * dq.block_shape[0], 0], memory.p_or_dq.index(NUMBER), stores)


@gluon.jit
def claim(turn):
    """Whether this CTA is the first of those that visit the same rows; if not, wait until that one's dQ is stored.

    ``turn``, in global memory, is 0 before, 1 while the first CTA computes, and 2 when it has stored. That one waits
    for no other CTA, so every wait ends.
    """
    value = gl.atomic_cas(turn, 0, 1, sem="acquire")
    is_first = value == 0
    while value == 1:
        value = gl.atomic_add(turn, 0, sem="acquire")
    fence_proxy(value)
    return is_first


@gluon.jit
def wait_for(address, number):
    """Wait until global memory holds a number. TMA's additions that follow come after what it tells of."""
    value = gl.atomic_add(address, 0, sem="acquire")
    while value != number:
        value = gl.atomic_add(address, 0, sem="acquire")
    fence_proxy(value)


@gluon.jit
def fence_proxy(unused):
    """What TMA does after this comes after what was read before it."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [unused], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def finish_additions(unused):
    """Wait until what TMA stored or added is visible; Triton waits only until TMA has read it.

    A `fence.proxy.async` of shared memory too would be a MEMBAR.GPU, in every step of a CTA that stores.
    """
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r", [unused], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
