"""Small tiles, of which tests have several; plans made anew for each test; and calls that compute nothing."""

from __future__ import annotations

import pytest

from cs336_systems.attention import dispatch, tiled


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Of sizes that do not divide each other, nor the lengths that tests have."""
    monkeypatch.setattr(tiled, "TILE_Q", 32)
    monkeypatch.setattr(tiled, "TILE_K", 24)


@pytest.fixture
def no_plans():
    """No plan is kept from before, nor after."""
    dispatch.clear_plans()
    yield
    dispatch.clear_plans()


@pytest.fixture
def never_runs(no_plans, monkeypatch):
    """A call that reaches a backend fails."""

    def explode(*args, **kwargs):
        pytest.fail("a backend was reached")

    for backend in dispatch.BACKENDS:
        monkeypatch.setattr(backend, "plan", explode)
    monkeypatch.setattr(dispatch, "differentiable_plan", explode)
