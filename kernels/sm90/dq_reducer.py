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
    HEAD_DIM: gl.constexpr, STORES: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """The warp that adds each dQ tile from shared memory to global memory by TMA, so that no consumer waits for it.

    STORES: of the CTAs that visit the same rows of q, the one whose tile of keys was claimed first stores its dQ tile,
    so that there need be no zeros before; the others wait until it has. ``turns`` counts those that have finished, for
    each TILE_Q rows: that one, or if DETERMINISTIC, where each waits for all before its own, every one. Then sums are
    the same on every run.
    """
    gl.static_assert(STORES or not DETERMINISTIC)
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
                for half in gl.static_range(2):
                    # The addition of the other half may go on.
                    tma.store_wait(1 - half)
                    named_barriers.arrive(named_barriers.DQ_EMPTY + half, THREADS)
                before = outer
                turns_added = turns
                if STORES:
                    turns_added += rows // WG_ROWS + inner * (TILE_Q // WG_ROWS)
                    if DETERMINISTIC and tile_map.LAST_FIRST:
                        # Tiles with higher numbers were claimed before: as many of them as reach this tile of q.
                        while seq.reaches(following, inner, tile):
                            following += 1
                        before = following - 1 - outer
                    elif tile_map.LAST_FIRST:
                        before = seq.reaches(following, inner, tile).to(gl.int32)
                    if not DETERMINISTIC:
                        before = gl.minimum(before, 1)
                    wait_for(turns_added, before)
                for half in gl.static_range(2):
                    named_barriers.sync(named_barriers.DQ_FULL + half, THREADS)
                    visited = seq.visited(inner, visits)
                    if memory.K_TAIL > 0:
                        for piece in gl.static_range(2):
                            add_piece(dq, memory, first + visited * DQ_ROWS, 2 * half + piece, before, STORES)
                    else:
                        coords = [first + visited * DQ_ROWS + half * (DQ_ROWS // 2), 0]
                        add(dq, coords, memory.p_or_dq.index(half), before, STORES)
                if memory.K_TAIL > 0:
                    for half in gl.static_range(2):
                        named_barriers.sync(named_barriers.DQ_TAIL_FULL + half, THREADS)
                        visited = seq.visited(inner, visits)
                        add_piece(dq, memory, first + visited * DQ_ROWS, 4 + half, before, STORES)
                if STORES:  # noqa: SIM102 - known when compiled
                    if DETERMINISTIC or before == 0:
                        finish_additions(turn)
                        gl.atomic_add(turns_added, 1, sem="release")
        turn += 1
        command, batch, head, start = memory.scheduler.pop(turn, 1)
    tma.store_wait(0)


@gluon.jit
def add(dq, coords, buffer, before, STORES: gl.constexpr):
    """Add a part of a dQ tile, or with STORES store it if no other CTA has done so ``before``."""
    if STORES and before == 0:
        async_store(dq, coords, buffer)
    else:
        async_atomic_add(dq, coords, buffer)


@gluon.jit
def add_piece(dq, memory, first, NUMBER: gl.constexpr, before, STORES: gl.constexpr):
    """Add or store 32 columns of a dQ tile, which begins at a row of its descriptor: see `add`."""
    add(dq, [first + NUMBER * dq.block_shape[0], 0], memory.p_or_dq.index(NUMBER), before, STORES)


@gluon.jit
def wait_for(address, number):
    """Wait until global memory holds a number. TMA's additions that follow come after what it tells of."""
    value = gl.atomic_add(address, 0, sem="acquire")
    while value != number:
        value = gl.atomic_add(address, 0, sem="acquire")
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def finish_additions(unused):
    """Wait until TMA's additions are visible; Triton waits only until it has read what it adds."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r", [unused], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
