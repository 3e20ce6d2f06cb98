"""Tile configurations: a table looked up at run time, never a search.

A row says how one pass of the portable kernels is tiled, for an architecture, a kind of arithmetic and a padded head
dimension; where that makes programs for half the device or less, a second table's row may say it better.
`benchmarks/tune.py` searches and prints new rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch

Pass = Literal["forward", "dq", "dkdv"]
CACHED = "cached"
"""What attention over a cache is called among the pins."""
Arithmetic = Literal["half", "tf32", "float32"]
"""What products are computed in: float16 or bfloat16 inputs; float32 ones in TF32; those at float32-level error."""


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is tiled: rows of q and of k a tile, warps a program, stages of the software pipeline.

    ahead: whether the forward computes each tile's scores a step ahead, so that the tensor cores have work while the
    softmax is taken. It costs the registers of a second tile of scores, and the products of one tile too many.
    """

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int
    ahead: bool = False

    @property
    def options(self) -> dict[str, int]:
        """The launch options, as Triton takes them."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def programs(self, name: Pass, length: int, matrices: int, sequences: int = 0) -> int:
        """How many programs a pass launches for so many matrices of ``length`` rows: of k for "dkdv", else of q.

        If these are packed ``sequences``, each has a tile that may be cut short, and so have the rows after the last.
        """
        tile = self.tile_k if name == "dkdv" else self.tile_q
        return matrices * (length // tile + sequences + 1 if sequences else -(-length // tile))


WIDEST_TILE = 256
"""The padded head dimension that a tile holds at most; wider ones are taken in slices."""

Row = tuple[Pass, Arithmetic, int]
"""What a configuration is looked up by: pass, arithmetic, padded head dimension."""

_pins: dict[str, TileConfig] = {}
_version = 0
_portable_alone = False


def lookup(
    name: Pass,
    arithmetic: Arithmetic,
    head_dim: int,
    device: torch.device,
    length: int = 1 << 30,
    matrices: int = 1,
    with_rules: bool = False,
) -> TileConfig:
    """The configuration of a pass on a device.

    Args:
        name, arithmetic, head_dim: the row; the head dimension is padded, a power of two from 16 on. One that is wider
            than a tile takes the row of its slices, with the smallest tiles there are: anywhere they spill little.
        length, matrices: how much there is to divide among programs, as `TileConfig.programs` takes it; unless said,
            enough to occupy any device.
        with_rules: whether more becomes of pairs than a causal mask does: rules, a window's other edge, dropout.
    """
    if name in _pins:
        return _pins[name]
    # TF32 runs the kernels of 16-bit inputs, on float16 parts of float32 ones.
    row: Row = (name, "half" if arithmetic == "tf32" else arithmetic, columns_of_a_tile(head_dim, arithmetic))
    architecture = architecture_of(device)
    if head_dim > WIDEST_TILE:
        return WITH_RULES["sm_86"][row]
    if with_rules:
        return WITH_RULES[architecture][row]
    config = TABLES[architecture][row]
    if leaves_half_idle(config.programs(name, length, matrices), device):
        return SMALL_GRIDS.get(architecture, {}).get(row, config)
    return config


def columns_of_a_tile(head_dim: int, arithmetic: Arithmetic) -> int:
    """How many columns tiles hold of a padded head dimension: all, or a slice, which float32's two parts make narrower.

    In slices of 256 they spill some KB a thread.
    """
    if head_dim <= WIDEST_TILE:
        return head_dim
    return 128 if arithmetic == "float32" else WIDEST_TILE


def lookup_cached(arithmetic: Arithmetic, head_dim: int, device: torch.device) -> TileConfig:
    """The tiles of attention over a cache, for a padded head dimension.

    So few rows that Triton takes Ampere's matrix instructions, or none for float32: they have only to keep up with the
    memory. On an H200 programs of two warps, each with tiles of keys of 8 KiB and their values in three stages, read
    it as fast as a copy does (docs/kernels.md); for float32 twice that, with eight warps, is reasoned, not measured.
    """
    if CACHED in _pins:
        return _pins[CACHED]
    rows, bytes_each, warps, tile = (32, 2, 2, 8 * 1024) if arithmetic == "half" else (16, 4, 8, 16 * 1024)
    keys = tile // (columns_of_a_tile(head_dim, arithmetic) * bytes_each)
    stages = 3 if architecture_of(device) in ("sm_90", "sm_100") else 2
    return TileConfig(rows, max(16, min(128, keys)), warps, stages)


@contextmanager
def pin(**configs: TileConfig) -> Iterator[None]:
    """Use these configurations, named by pass, instead of the table's: for tests and for the search.

    >>> with pin(forward=TileConfig(64, 32, 4, 2)): ...
    """
    global _version
    before = dict(_pins)
    _pins.update(configs)
    _version += 1
    try:
        yield
    finally:
        _pins.clear()
        _pins.update(before)
        _version += 1


@contextmanager
def portable() -> Iterator[None]:
    """Have the portable kernels compute what kernels for one architecture otherwise would: for comparisons."""
    global _version, _portable_alone
    before, _portable_alone = _portable_alone, True
    _version += 1
    try:
        yield
    finally:
        _portable_alone = before
        _version += 1


def is_portable_alone() -> bool:
    """Whether kernels for one architecture have to leave calls to the portable ones, whose tiles may be pinned."""
    return _portable_alone or bool(_pins)


def version() -> int:
    """Changes whenever what `lookup` returns may have changed."""
    return _version


@functools.cache
def architecture_of(device: torch.device) -> str:
    """The name of the table a device uses: its own architecture's, or that of the nearest older one that fits."""
    if device.type != "cuda":
        return "sm_80"
    capability = torch.cuda.get_device_capability(device)
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared < 160 * 1024:
        return "sm_86"
    return "sm_80" if capability < (9, 0) else "sm_90" if capability < (10, 0) else "sm_100"


def leaves_half_idle(programs: int, device: torch.device) -> bool:
    """Whether twice as many programs, of half the size, would still all run at the same time."""
    return 2 * programs <= processors_of(device)


@functools.cache
def processors_of(device: torch.device) -> int:
    """How many programs run at the same time at least, one on each streaming multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _rows(name: Pass, arithmetic: Arithmetic, *configs: tuple[int, int, int, int]) -> dict[Row, TileConfig]:
    """Rows for padded head dimensions 16, 32, 64, 128 and 256, in that order."""
    return {(name, arithmetic, 16 << step): TileConfig(*config) for step, config in enumerate(configs)}


def _installed_triton() -> str:
    """Its version, without importing it; none where it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


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
    # At 16 and 32, forward and dq of half were searched when their matrix instructions were serialised without a mask.
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
# Instead of those by a Triton whose code for them spills twice to ten times as much; of some five tried each is the one
# most like them that spills little, and unless a comment says so, their speed was not measured.
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
        # Searched on an H200, sequences of 4,096: 1.11 times as fast as the usual one.
        ("dkdv", "float32", 128): TileConfig(64, 128, 8, 1),
    },
}
TABLES["sm_90"] |= BY_TRITON.get(_installed_triton()[:4], {})
# Ampere and Ada chips for graphics, and Blackwell's: 99 KiB of shared memory a program.
TABLES["sm_86"] = TABLES["sm_80"] | {
    ("forward", "half", 256): TileConfig(64, 32, 8, 2),
    ("dkdv", "half", 256): TileConfig(32, 32, 8, 1),
    ("dkdv", "float32", 128): TileConfig(32, 32, 4, 1),
    ("dkdv", "float32", 256): TileConfig(16, 16, 8, 1),
}
# Triton 3.7 compiles two-part products of this size for tensor memory into a kernel that does nothing; 32 rows go to
# the older matrix instructions.
TABLES["sm_100"] = TABLES["sm_80"] | {("dkdv", "float32", 128): TileConfig(32, 32, 4, 1)}

# Instead of the above where rules are applied, or a window has two edges, or weights are dropped: what that takes in
# registers, and in shared memory where a tile of a bias is copied ahead, is left free. Reasoned, not searched, but for
# those of half at 64 and 128 on sm_90.
_SMALLER: dict[Row, TileConfig] = {
    **_rows("forward", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
    **_rows("dq", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 1)),
    **_rows("dkdv", "half", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
    **_rows("forward", "float32", (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    **_rows("dq", "float32", (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (32, 16, 8, 1)),
    **_rows("dkdv", "float32", (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 8, 1), (16, 32, 8, 1)),
}
WITH_RULES: dict[str, dict[Row, TileConfig]] = {
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

# Instead of the above, where that would leave half of the processors idle. Smaller tiles: more programs, each of which
# ends sooner. Those for float32 at 128 are the fastest of some ten tried on 8 matrices of 1,024 rows; the others were
# reasoned, not searched.
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
