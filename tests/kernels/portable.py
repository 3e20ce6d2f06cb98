"""The Triton backend in tests: with given tiles, and on every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cs336_systems.attention import use_backends
from cs336_systems.kernels.triton import tiles
from cs336_systems.kernels.triton.tiles import TileConfig


@contextmanager
def portable(**configs: TileConfig) -> Iterator[None]:
    """Have the Triton backend compute every flash call, with these configurations by pass."""
    with use_backends("triton"), tiles.pin(**configs):
        yield


def tiled(tile_q: int, tile_k: int, num_warps: int = 4, num_stages: int = 1, ahead: bool = False):
    """`portable` with one configuration for every pass of attention."""
    config = TileConfig(tile_q, tile_k, num_warps, num_stages, ahead)
    return portable(forward=config, dq=config, dkdv=config)
