"""The tile configurations that tune.py tries for a row of the table, the most promising first."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from benchmarks.lib.harness import Case

TileConfig = Any
"""`TileConfig` of `tiles()`."""
TILES, WARPS, STAGES = (16, 32, 64, 128, 256), (2, 4, 8), (1, 2, 3, 4, 5)
KERNELS = ("forward", "dq", "dkdv")
# float32 operands are two float16 halves.
_ELEMENT_BYTES = {"half": 2, "float32": 4}
# Registers for accumulators and scores; a thread has 255, and more spill.
_MOST_NUMBERS_PER_THREAD = {"half": 288, "float32": 192}
_FEWEST_NUMBERS_PER_THREAD = 4
# Elements of a streamed tile. Beyond, a compilation takes up to a minute, and its kernel spills.
_MOST_STREAMED_PER_THREAD = 128
# The smallest tile of Hopper's matrix instructions, which read both operands from shared memory.
_WARP_GROUP_ROWS, _WARP_GROUP_WARPS = 64, 4


def tiles() -> ModuleType:
    """The module with the tables of the portable Triton kernels, `TileConfig`, `lookup` and `pin`."""
    from cs336_systems.kernels.triton import tiles as module

    return module


@dataclass(frozen=True)
class TableRow(Case):
    """A row of a table, for q, k and v of (batch, heads, length, head_dim), plain or with masks and score changes."""

    kernel: str
    precision: str
    head_dim: int
    batch: int
    heads: int
    length: int
    mods: bool = False

    @property
    def key(self) -> str:
        """The row's key, as the tables write it."""
        return f'("{self.kernel}", "{self.precision}", {self.head_dim})'

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return torch.bfloat16 if self.precision == "half" else torch.float32

    def kept(self, config: TileConfig) -> int:
        """Rows of the tile that a program keeps."""
        return int(config.tile_k if self.kernel == "dkdv" else config.tile_q)

    def streamed(self, config: TileConfig) -> int:
        """Rows of the tiles that a program loads one after the other."""
        return int(config.tile_q if self.kernel == "dkdv" else config.tile_k)

    def numbers_per_thread(self, config: TileConfig) -> float:
        """Float32 numbers of the accumulators and scores."""
        accumulators = self.kept(config) * self.head_dim * (2 if self.kernel == "dkdv" else 1)
        scores = config.tile_q * config.tile_k * (2 if config.ahead else 1)
        return (accumulators + scores) / (32 * config.num_warps)

    def shared_bytes(self, config: TileConfig, capability: tuple[int, int]) -> int:
        """A lower bound of the shared memory of a program.

        On Hopper it is close: the operands that are kept (q, or two in the backward), and both that are streamed, once
        per stage. Older matrix instructions read kept operands from registers, and their pipeline has a buffer less.
        """
        row_bytes = self.head_dim * _ELEMENT_BYTES[self.precision]
        kept = self.kept(config) * row_bytes * (1 if self.kernel == "forward" else 2)
        streamed = self.streamed(config) * row_bytes
        if config.num_stages == 1:
            return streamed  # both streamed operands may take turns
        groups = self.kept(config) >= _WARP_GROUP_ROWS and config.num_warps >= _WARP_GROUP_WARPS
        if capability[0] == 9 and groups:
            return int(kept + 2 * streamed * config.num_stages)
        return int(2 * streamed * (config.num_stages - 1))


def candidates(row: TableRow, now: TileConfig, capability: tuple[int, int], shared_limit: int) -> list[TileConfig]:
    """``now``, then the configurations that may fit into registers and shared memory, those most like ``now`` first."""

    def may_fit(config: TileConfig) -> bool:
        if row.kernel == "forward" and config.num_stages == 1 and capability[0] == 9:
            return False  # the launch replaces such tiles by others
        numbers, most = row.numbers_per_thread(config), _MOST_NUMBERS_PER_THREAD[row.precision]
        streamed = row.streamed(config) * row.head_dim / (32 * config.num_warps)
        return (
            _FEWEST_NUMBERS_PER_THREAD <= numbers <= most
            and streamed <= _MOST_STREAMED_PER_THREAD
            and row.shared_bytes(config, capability) <= shared_limit
        )

    def distance(config: TileConfig) -> float:
        sizes = [math.log2(getattr(config, n) / getattr(now, n)) for n in ("tile_q", "tile_k", "num_warps")]
        return sum(map(abs, sizes)) + (abs(config.num_stages - now.num_stages) + abs(config.ahead - now.ahead)) / 2

    ahead = (False, True) if row.kernel == "forward" and not row.mods else (False,)
    every = (tiles().TileConfig(*values) for values in itertools.product(TILES, TILES, WARPS, STAGES, ahead))
    return [now, *sorted((config for config in every if config != now and may_fit(config)), key=distance)]
