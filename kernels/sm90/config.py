"""How each head dimension is computed on Hopper: tiles, stages and registers, and the head dimensions there are.

Imports no Triton.
"""

from __future__ import annotations

from typing import NamedTuple


class ForwardConfig(NamedTuple):
    """tile_k keys a step, a ring of `stages` such tiles of k and of v, `groups` warp groups of 64 rows of q.

    registers: of a thread that computes; copy_registers: of the copying warp's; most_registers: what each starts with.
    own_room: whether the output is laid out beside q in shared memory, so that the next q can be copied before.
    programs: how many a multiprocessor runs at once.
    """

    tile_k: int
    groups: int
    stages: int
    registers: int
    copy_registers: int
    most_registers: int
    own_room: bool
    programs: int = 1


class Columns(NamedTuple):
    """How the forward holds heads: `width` columns in one tile, and so many more of q and k, and of v, in another."""

    width: int
    key_more: int
    value_more: int


class BackwardConfig(NamedTuple):
    """`keys` of a program, tile_q rows a step, and a ring of `stages` such tiles.

    Of two groups that compute each has 64 keys, or both have the same. part: the columns of a tile of dK, dV or dQ that
    a group stores or adds at a time. turned: whether programs begin at different tiles of q, where none is masked.
    """

    keys: int
    tile_q: int
    part: int
    stages: int
    registers: int
    copy_registers: int
    most_registers: int
    turned: bool = False


SHORT_LENGTH = 1024
FORWARD = {
    # By width, and whether tiles of rows see unlike numbers of keys, or few. Then three programs of one group each are
    # fastest, one's ends under another's steps; else three groups that read the same keys and values.
    (64, True): ForwardConfig(64, 1, 3, 136, 24, 80, True, 3),
    (64, False): ForwardConfig(64, 3, 4, 160, 32, 128, True),
    # From here on one program's tiles fill the shared memory; with two smaller ones it is slower.
    (128, True): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (128, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # The output takes 128 registers; q and two tiles of k and v fill the shared memory.
    (256, True): ForwardConfig(64, 2, 2, 240, 24, 168, False),
    (256, False): ForwardConfig(64, 2, 2, 240, 24, 168, False),
}
FORWARD_MORE = {
    # The same by columns of q and k, of which there are two tiles.
    (64, 16, True): ForwardConfig(64, 1, 2, 136, 24, 80, True, 3),
    (64, 16, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    (64, 32, True): ForwardConfig(64, 1, 2, 136, 24, 80, True, 3),
    (64, 32, False): ForwardConfig(128, 2, 2, 240, 24, 168, True),
    # These fill the shared memory with 64 keys a step.
    (128, 64, True): ForwardConfig(64, 2, 2, 240, 24, 168, True),
    (128, 64, False): ForwardConfig(64, 2, 2, 240, 24, 168, True),
}
FORWARD_PACKED = {
    # By columns of q and k in both tiles, where sequences are packed. The copying warp keeps more, in registers that
    # the others give up, which at 96 columns one of three programs cannot.
    (64, 0): ForwardConfig(64, 1, 3, 120, 40, 80, True, 3),
    (64, 16): ForwardConfig(64, 1, 2, 120, 40, 80, True, 3),
    (64, 32): ForwardConfig(128, 2, 2, 224, 56, 168, True),
    (128, 0): ForwardConfig(128, 2, 2, 224, 56, 168, True),
    (128, 64): ForwardConfig(64, 2, 2, 224, 56, 168, True),
    (256, 0): ForwardConfig(64, 2, 2, 232, 40, 168, False),
}
BACKWARD = {
    64: BackwardConfig(128, 128, 64, 2, 240, 24, 168, True),
    128: BackwardConfig(128, 64, 64, 2, 240, 24, 168),
    256: BackwardConfig(64, 64, 128, 2, 240, 24, 168),
}
WIDTHS = (64, 128, 256)
"""Columns that tiles have; head dimensions between are filled up with zeros as they are copied."""


def width_of(head_dim: int) -> int:
    """How many columns the tiles of a head dimension have."""
    return next(width for width in WIDTHS if width >= head_dim)


def forward_config(
    columns: Columns, band: tuple[int | None, int | None], k_len: int, *, is_packed: bool
) -> ForwardConfig:
    """How the forward computes a call with so many keys."""
    width, more, _ = columns
    if is_packed:
        return FORWARD_PACKED[width, more]
    uneven_or_few = band != (None, None) or k_len <= SHORT_LENGTH
    return FORWARD_MORE[width, more, uneven_or_few] if more else FORWARD[width, uneven_or_few]


def columns_of(head_dim: int, v_head_dim: int) -> Columns | None:
    """How the forward holds heads of these dimensions; None if it does not."""
    for width, more, _ in sorted(FORWARD_MORE):
        if width < head_dim <= width + more:
            if v_head_dim == head_dim:
                return Columns(width, more, more)
            return Columns(width, more, 0) if width // 2 < v_head_dim <= width else None
    return Columns(width_of(head_dim), 0, 0) if v_head_dim == head_dim else None
