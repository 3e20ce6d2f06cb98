"""Tiles small enough for tests to have several."""

from __future__ import annotations

import pytest

from cs336_systems.attention import tiled


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Of sizes that do not divide each other, nor the lengths that tests have."""
    monkeypatch.setattr(tiled, "TILE_Q", 32)
    monkeypatch.setattr(tiled, "TILE_K", 24)
