"""Tile configurations: a table that is looked up at run time, never a search.

A row says how one pass is tiled, for an architecture, a precision and a padded head dimension. `benchmarks/tune.py`
searches rows and prints them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import triton

from .. import launching
from ..call import plan_caches

Pass = Literal["forward", "dq", "dkdv"]
Precision = Literal["half", "tf32", "float32"]
"""How products are computed: of float16 or bfloat16 inputs; of float32 inputs in TF32; at float32's error."""


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is tiled: rows of q and of k in a tile, warps per program, stages of the software pipeline.

    ahead: compute each tile's scores one step ahead (forward only), so that tensor cores work during the softmax. It
    costs registers for a second tile of scores, and the products of one tile more.
    """

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int
    ahead: bool = False

    @property
    def options(self) -> dict[str, int]:
        """The launch options for Triton."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def programs(self, name: Pass, length: int, batch_heads: int, num_seqs: int = 0) -> int:
        """The programs of a pass over matrices of ``length`` rows: of k for "dkdv", otherwise of q.

        Each of ``num_seqs`` packed sequences may end with an incomplete tile, and so may the rows after the last one.
        """
        tile = self.tile_k if name == "dkdv" else self.tile_q
        return batch_heads * (length // tile + num_seqs + 1 if num_seqs else -(-length // tile))


WIDEST_TILE = 256
"""The largest padded head dimension of a tile; wider ones are computed in slices."""

Row = tuple[Pass, Precision, int]
"""What a configuration is looked up by: pass, precision, padded head dimension."""

_pins: dict[str, TileConfig] = {}


def lookup(
    name: Pass,
    precision: Precision,
    head_dim: int,
    device: torch.device,
    length: int = 1 << 30,
    batch_heads: int = 1,
    with_mods: bool = False,
) -> TileConfig:
    """The configuration of a pass on a device.

    Args:
        name, precision, head_dim: the row; head_dim is padded, a power of two from 16 on. One that is wider than a tile
            takes the row of its slices in the table with the smallest tiles: it spills little on every GPU.
        length, batch_heads: the work to divide among programs, see `TileConfig.programs`. A grid that leaves half of
            the device idle takes smaller tiles.
        with_mods: whether pairs are changed by more than a causal mask: rules, a second edge of a window, dropout.
    """
    if name in _pins:
        return _pins[name]
    # TF32 runs the kernels of 16-bit inputs, on one float16 half of float32 inputs.
    row: Row = (name, "half" if precision == "tf32" else precision, columns_of_a_tile(head_dim, precision))
    architecture = architecture_of(device)
    if head_dim > WIDEST_TILE:
        return WITH_MODS["sm_86"][row]
    if with_mods:
        return WITH_MODS[architecture][row]
    config = TABLES[architecture][row]
    if 2 * config.programs(name, length, batch_heads) <= launching.num_sms(device):
        return SMALL_GRIDS.get(architecture, {}).get(row, config)
    return config


def columns_of_a_tile(head_dim: int, precision: Precision) -> int:
    """The columns of a tile: a padded head dimension, or a slice. float32's two halves spill KBs in slices of 256."""
    if head_dim <= WIDEST_TILE:
        return head_dim
    return 128 if precision == "float32" else WIDEST_TILE


def lookup_decode(precision: Precision, head_dim: int, device: torch.device) -> TileConfig:
    """The configuration of decoding, for a padded head dimension.

    With so few rows Triton takes Ampere's matrix instructions, or none for float32: they need only keep up with the
    memory. On an H200 programs of two warps, with tiles of 8 KiB of keys in three stages, read at a copy's rate
    (docs/kernels.md); twice the tile with eight warps, for float32, is reasoned, not measured.
    """
    if "decode" in _pins:
        return _pins["decode"]
    rows, itemsize, warps, tile = (32, 2, 2, 8 * 1024) if precision == "half" else (16, 4, 8, 16 * 1024)
    keys = tile // (columns_of_a_tile(head_dim, precision) * itemsize)
    stages = 3 if architecture_of(device) in ("sm_90", "sm_100") else 2
    return TileConfig(rows, max(16, min(128, keys)), warps, stages)


@contextmanager
def pin(**configs: TileConfig) -> Iterator[None]:
    """Use these configurations, by pass or "decode", instead of the table's: for tests and for the search.

    >>> with pin(forward=TileConfig(64, 32, 4, 2)): ...
    """
    before = dict(_pins)
    _pins.update(configs)
    _forget_plans()
    try:
        yield
    finally:
        _pins.clear()
        _pins.update(before)
        _forget_plans()


def _forget_plans() -> None:
    for cache in plan_caches:
        cache.clear()


@functools.cache
def architecture_of(device: torch.device) -> str:
    """The table for a device: of its architecture, or of the nearest older one that fits."""
    if device.type != "cuda":
        return "sm_80"
    capability = torch.cuda.get_device_capability(device)
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < 160 * 1024:
        return "sm_86"
    return "sm_80" if capability < (9, 0) else "sm_90" if capability < (10, 0) else "sm_100"


def _rows(name: Pass, precision: Precision, *configs: tuple[int, int, int, int]) -> dict[Row, TileConfig]:
    """Rows for padded head dimensions 16, 32, 64, 128 and 256."""
    return {(name, precision, 16 << step): TileConfig(*config) for step, config in enumerate(configs)}


TABLES: dict[str, dict[Row, TileConfig]] = {
    "sm_80": {
        **_rows("forward", "half", (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
        **_rows("dq", "half", (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
        **_rows("dkdv", "half", (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 1)),
        **_rows("forward", "float32", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
        **_rows("dq", "float32", (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
        **_rows("dkdv", "float32", (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 1), (16, 32, 8, 1)),
    },
    # Searched on an H200 with torch 2.11.0+cu130 and triton 3.6.0, sequences of 4,096 (2,048 for float32 at 256).
    # At 16 and 32, forward and dq of half were searched while their matrix instructions were serialised without a mask.
    "sm_90": {
        **_rows("forward", "half", (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 32, 8, 3)),
        **_rows("dq", "half", (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3)),
        **_rows("dkdv", "half", (32, 128, 4, 1), (32, 128, 4, 1), (128, 64, 4, 2), (64, 128, 8, 1), (128, 32, 8, 2)),
        **_rows(
            "forward", "float32", (64, 128, 4, 3), (64, 128, 4, 3), (128, 128, 8, 3), (128, 64, 8, 2), (32, 64, 8, 2)
        ),
        **_rows("dq", "float32", (128, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3), (32, 64, 8, 2)),
        **_rows("dkdv", "float32", (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (32, 128, 8, 2), (64, 32, 8, 1)),
    },
}
# For versions of Triton whose code for the rows above spills two to ten times as much: the most similar of about five
# configurations that spills little. Their speed was not measured unless a comment says so.
_SINCE_3_8: dict[Row, TileConfig] = {
    ("forward", "float32", 256): TileConfig(32, 32, 8, 2),
    ("dq", "float32", 256): TileConfig(32, 32, 8, 2),
    ("dkdv", "float32", 256): TileConfig(32, 32, 8, 1),
}
BY_TRITON: dict[str, dict[Row, TileConfig]] = {
    "3.8.": _SINCE_3_8,
    "3.9.": _SINCE_3_8
    | {
        ("dkdv", "float32", 32): TileConfig(64, 64, 4, 2),
        # Searched on an H200, sequences of 4,096: 1.11 times as fast as the row above.
        ("dkdv", "float32", 128): TileConfig(64, 128, 8, 1),
    },
}
TABLES["sm_90"] |= BY_TRITON.get(triton.__version__[:4], {})
# Graphics chips (Ampere, Ada, Blackwell): 99 KiB of shared memory per program.
TABLES["sm_86"] = TABLES["sm_80"] | {
    ("forward", "half", 256): TileConfig(64, 32, 8, 2),
    ("dkdv", "half", 256): TileConfig(32, 32, 8, 1),
    ("dkdv", "float32", 128): TileConfig(32, 32, 4, 1),
    ("dkdv", "float32", 256): TileConfig(16, 16, 8, 1),
}
# Triton 3.7 compiles products of two halves with 64 rows for tensor memory into a kernel without instructions; 32 rows
# take the older matrix instructions.
TABLES["sm_100"] = TABLES["sm_80"] | {("dkdv", "float32", 128): TileConfig(32, 32, 4, 1)}

# Where rules are applied, a window has two edges or probabilities are dropped: tiles that leave registers, and shared
# memory for a tile of a bias. Reasoned, not searched, except half at 64 and 128 on sm_90.
_SMALLER: dict[Row, TileConfig] = {
    **_rows("forward", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    **_rows("dq", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
    **_rows("dkdv", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    **_rows("forward", "float32", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    **_rows("dq", "float32", (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
    **_rows("dkdv", "float32", (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 1), (16, 32, 8, 1)),
}
WITH_MODS: dict[str, dict[Row, TileConfig]] = {
    "sm_80": _SMALLER,
    "sm_86": _SMALLER
    | {
        ("forward", "half", 256): TileConfig(64, 32, 8, 1),
        ("dq", "half", 128): TileConfig(64, 32, 8, 2),
        ("dq", "half", 256): TileConfig(32, 32, 8, 1),
        ("dkdv", "half", 128): TileConfig(32, 64, 8, 1),
        ("forward", "float32", 128): TileConfig(32, 32, 8, 1),
        ("dq", "float32", 128): TileConfig(32, 16, 8, 1),
        ("dkdv", "float32", 128): TileConfig(16, 32, 8, 1),
        ("dkdv", "float32", 256): TileConfig(16, 16, 8, 1),
    },
    "sm_90": _SMALLER
    | {
        ("dq", "half", 256): TileConfig(128, 32, 8, 2),
        ("dq", "float32", 128): TileConfig(128, 32, 8, 2),
        ("forward", "half", 128): TileConfig(64, 64, 4, 3),
        ("dq", "half", 128): TileConfig(64, 64, 4, 2),
        ("dkdv", "half", 128): TileConfig(32, 64, 4, 2),
        ("forward", "half", 64): TileConfig(64, 64, 4, 3),
        ("dq", "half", 64): TileConfig(64, 64, 4, 4),
        ("dkdv", "half", 64): TileConfig(32, 64, 4, 1),
    },
    "sm_100": _SMALLER,
}

# Where the tables above leave half of the multiprocessors idle. float32 at 128: the fastest of about ten configurations
# on 8 matrices of 1,024 rows. The others are reasoned, not searched.
SMALL_GRIDS: dict[str, dict[Row, TileConfig]] = {
    "sm_90": {
        ("forward", "half", 128): TileConfig(64, 64, 4, 3),
        ("dq", "half", 128): TileConfig(64, 64, 4, 3),
        ("dkdv", "half", 128): TileConfig(64, 64, 8, 2),
        ("forward", "float32", 64): TileConfig(64, 64, 4, 3),
        ("forward", "float32", 128): TileConfig(64, 64, 4, 3),
        ("dq", "float32", 16): TileConfig(64, 64, 4, 3),
        ("dq", "float32", 64): TileConfig(64, 64, 4, 3),
        ("dq", "float32", 128): TileConfig(64, 64, 4, 2),
        ("dkdv", "float32", 128): TileConfig(32, 64, 4, 2),
    },
}
