"""Which tile configurations are worth trying for a row of the table, and in which order."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from cs336_systems.kernels.tuning import Arithmetic, Pass, TileConfig

TILES = (16, 32, 64, 128, 256)
WARPS = (2, 4, 8)
STAGES = (1, 2, 3, 4, 5)

# Bytes of one element of an operand: float32 ones are two float16 parts.
_ELEMENT_BYTES: dict[str, int] = {"half": 2, "float32": 4}
# Float32 numbers that a thread may hold in accumulators and scores; it has 255 registers, and more are spilled.
_MOST_NUMBERS_A_THREAD: dict[str, float] = {"half": 288.0, "float32": 192.0}
_FEWEST_NUMBERS_A_THREAD = 4.0
# Elements of one streamed tile for each thread. Beyond, a compilation takes up to a minute, and its kernel spills.
_MOST_STREAMED_A_THREAD = 128.0
# From so many rows and warps on Hopper's matrix instructions are used, which read both operands from shared memory.
_WARP_GROUP_ROWS, _WARP_GROUP_WARPS = 64, 4


@dataclass(frozen=True)
class Row:
    """A row of the table: pass, arithmetic and padded head dimension."""

    name: Pass
    arithmetic: Arithmetic
    head_dim: int

    def __str__(self) -> str:
        return f'("{self.name}", "{self.arithmetic}", {self.head_dim})'

    def kept(self, config: TileConfig) -> int:
        """Rows of the tile that a program keeps while it walks along the other axis."""
        return config.tile_k if self.name == "dkdv" else config.tile_q

    def streamed(self, config: TileConfig) -> int:
        """Rows of the tiles that a program walks along."""
        return config.tile_q if self.name == "dkdv" else config.tile_k


def shared_bytes_at_least(row: Row, config: TileConfig, capability: tuple[int, int]) -> int:
    """A lower bound of the shared memory that a program takes.

    On Hopper it is what Triton takes, but for the statistics of rows: the operands that are kept (q, or two of them in
    the backward) and both that are streamed, once for each stage. Without a pipeline the streamed ones may take turns.
    Older matrix instructions read kept operands from registers, and their pipeline has one buffer less.
    """
    width = row.head_dim * _ELEMENT_BYTES[row.arithmetic]
    kept = row.kept(config) * width * (1 if row.name == "forward" else 2)
    streamed = row.streamed(config) * width
    if config.num_stages == 1:
        return streamed
    in_groups = row.kept(config) >= _WARP_GROUP_ROWS and config.num_warps >= _WARP_GROUP_WARPS
    if capability[0] == 9 and in_groups:
        return kept + 2 * streamed * config.num_stages
    return 2 * streamed * (config.num_stages - 1)


def numbers_a_thread(row: Row, config: TileConfig) -> float:
    """Float32 numbers of the accumulators and of the scores, for each thread of a program."""
    accumulated = row.kept(config) * row.head_dim * (2 if row.name == "dkdv" else 1)
    scores = config.tile_q * config.tile_k * (2 if config.ahead else 1)
    return (accumulated + scores) / (32 * config.num_warps)


def candidates(row: Row, now: TileConfig, capability: tuple[int, int], shared_limit: int) -> list[TileConfig]:
    """Configurations that may fit into registers and shared memory: `now`, then those most like it first.

    The order matters where time runs out. `shared_limit` is in bytes a program.
    """

    def may_fit(config: TileConfig) -> bool:
        numbers = numbers_a_thread(row, config)
        if row.name == "forward" and config.num_stages == 1 and capability[0] == 9:
            return False  # it would be run on other tiles, see `describe_forward`
        return (
            _FEWEST_NUMBERS_A_THREAD <= numbers <= _MOST_NUMBERS_A_THREAD[row.arithmetic]
            and row.streamed(config) * row.head_dim <= _MOST_STREAMED_A_THREAD * 32 * config.num_warps
            and shared_bytes_at_least(row, config, capability) <= shared_limit
        )

    def distance(config: TileConfig) -> float:
        tiles = abs(math.log2(config.tile_q / now.tile_q)) + abs(math.log2(config.tile_k / now.tile_k))
        options = abs(math.log2(config.num_warps / now.num_warps)) + abs(config.num_stages - now.num_stages) / 2
        return tiles + options + abs(config.ahead - now.ahead) / 2

    ahead = (False, True) if row.name == "forward" else (False,)
    every = (TileConfig(*values) for values in itertools.product(TILES, TILES, WARPS, STAGES, ahead))
    return [now, *sorted((config for config in every if config != now and may_fit(config)), key=distance)]
