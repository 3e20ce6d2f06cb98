"""How each head dimension is computed on Hopper: tiles, stages and registers, and the head dimensions there are."""

from __future__ import annotations

from typing import NamedTuple


class ForwardConfig(NamedTuple):
    """tile_k keys a step, a ring of `stages` such tiles of k and of v, `groups` warp groups of 64 rows of q.

    registers: of a thread that computes; copy_registers: of the copying warp's; most_registers: what each starts with.
    own_room: whether the output is laid out beside q in shared memory, so that the next q can be copied before.
    """

    tile_k: int
    groups: int
    stages: int
    registers: int
    copy_registers: int
    most_registers: int
    own_room: bool


class BackwardConfig(NamedTuple):
    """tile_q rows a step, a ring of `stages` such tiles of q and of dout, and of dq_stages tiles of dQ."""

    tile_q: int
    stages: int
    dq_stages: int
    registers: int
    copy_registers: int
    most_registers: int


FORWARD = {
    # Three groups have 160 registers each; the scores of 64 x 128 pairs take 64 of them, weights and output 32 each.
    64: ForwardConfig(128, 3, 2, 160, 32, 128, True),
    128: ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # The output takes 128 registers; q and two tiles of k and v fill the shared memory.
    256: ForwardConfig(64, 2, 2, 240, 24, 168, False),
}
BACKWARD = {
    64: BackwardConfig(64, 2, 2, 240, 24, 168),
    128: BackwardConfig(64, 2, 1, 240, 24, 168),
}
