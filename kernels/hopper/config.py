"""How each head dimension is computed on Hopper: tiles, stages and registers, and the head dimensions there are.

Imports no Triton.
"""

from __future__ import annotations

from typing import NamedTuple

VERSIONS = ("3.6.", "3.7.")
"""Of Triton, that the compile tests cover."""

PACKED_COPY_REGISTERS = 56
"""Of the forward's copying warp where sequences are packed."""


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

    def for_packed(self) -> ForwardConfig:
        """The same where sequences are packed: the copying warp keeps more, in registers that the others give up."""
        given_up = (PACKED_COPY_REGISTERS - self.copy_registers) // self.groups
        return self._replace(registers=self.registers - given_up, copy_registers=PACKED_COPY_REGISTERS)


class Columns(NamedTuple):
    """How the forward holds heads: `width` columns in one tile, and so many more of q and k, and of v, in another."""

    width: int
    key_more: int
    value_more: int


class BackwardConfig(NamedTuple):
    """`keys` a program, tile_q rows a step, and a ring of `stages` such tiles of q and of dout.

    part: the columns of a tile of dK, dV or dQ that a warp group stores or adds at a time.
    """

    keys: int
    tile_q: int
    part: int
    stages: int
    registers: int
    copy_registers: int
    most_registers: int


FORWARD = {
    # By width, and whether keys after a row's own are hidden. Three groups have 160 registers a thread each; without a
    # mask they keep the tensor cores busier, with one 192 rows leave more of their first tiles hidden than 128 do.
    (64, False): ForwardConfig(64, 3, 4, 160, 32, 128, True),
    (64, True): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (128, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (128, True): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # The output takes 128 registers; q and two tiles of k and v fill the shared memory.
    (256, False): ForwardConfig(64, 2, 2, 240, 24, 168, False),
    (256, True): ForwardConfig(64, 2, 2, 240, 24, 168, False),
}
FORWARD_MORE = {
    # By columns of q and k, with two groups. The tiles of 192 fill the shared memory with 64 keys a step.
    (64, 16): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (64, 32): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (128, 64): ForwardConfig(64, 2, 2, 240, 24, 168, True),
}
BACKWARD = {
    64: BackwardConfig(128, 128, 64, 2, 240, 24, 168),
    128: BackwardConfig(128, 64, 64, 2, 240, 24, 168),
    256: BackwardConfig(64, 64, 128, 2, 240, 24, 168),
}
WIDTHS = (64, 128, 256)
"""Columns that tiles have; head dimensions between are filled up with zeros as they are copied."""


def width_of(head_dim: int) -> int:
    """How many columns the tiles of a head dimension have."""
    return next(width for width in WIDTHS if width >= head_dim)


def columns_of(head_dim: int, v_head_dim: int) -> Columns | None:
    """How the forward holds heads of these dimensions; None if it does not."""
    for width, more in sorted(FORWARD_MORE):
        if width < head_dim <= width + more:
            if v_head_dim == head_dim:
                return Columns(width, more, more)
            return Columns(width, more, 0) if width // 2 < v_head_dim <= width else None
    return Columns(width_of(head_dim), 0, 0) if v_head_dim == head_dim else None
