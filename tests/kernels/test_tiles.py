"""Every tiling computes the same, whatever divides whatever, and wherever an edge of the band crosses tiles."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.kernels import launching
from cs336_systems.kernels.triton import plans
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.testing import Shapes, evaluate, make_inputs

from ..attention.helpers import check
from .portable import portable, tiled

TILES = [(16, 16), (16, 64), (64, 16), (32, 128), (128, 32)]
MASKS = [False, "top_left", "bottom_right"]
SHAPES = {
    "longer_queries": Shapes.of(1, q_len=75, k_len=49, d=16, q_heads=2, kv_heads=1),
    "longer_keys": Shapes.of(1, q_len=33, k_len=130, d=20, dv=40),
    "whole_tiles": Shapes.of(1, q_len=64, k_len=128, d=16),
}


def tilings():
    """Every tile with every mask in both dtypes. Shapes, and scores computed a step ahead, take turns."""
    for row, tile in enumerate(TILES):
        for column, causal in enumerate(MASKS):
            for turn, dtype in enumerate([torch.float16, torch.float32]):
                name, ahead = [*SHAPES][(row + column + turn) % len(SHAPES)], (row + column) % 2 == turn
                case = f"{tile[0]}x{tile[1]}-{causal or 'full'}-{str(dtype).removeprefix('torch.')}-{name}"
                yield pytest.param((*tile, 4, 2, ahead), causal, dtype, SHAPES[name], id=case + "-ahead" * ahead)


@pytest.mark.parametrize(("tile", "causal", "dtype", "shapes"), [*tilings()])
def test_results_are_within_the_budget_for_every_tile(flash_device, tile, causal, dtype, shapes):
    inputs = make_inputs(shapes, dtype=dtype, device=flash_device)
    check("flash", inputs, causal=causal, during=tiled(*tile))


interpreted = pytest.mark.skipif(not launching.INTERPRETED, reason="compiles a kernel for each tile, for nothing")
SIDES = range(16)


def check_band(inputs, causal, window):
    """With a bias, whose gradient per pair has its own kernel."""
    bias = torch.randn(inputs.q.shape[-2], inputs.k.shape[-2], requires_grad=True)
    check("flash", inputs, {"window": window, "bias": bias}, causal=causal, during=tiled(16, 16))


@interpreted
@pytest.mark.parametrize("ahead", SIDES)
def test_a_diagonal_that_crosses_tiles(flash_device, ahead):
    inputs = make_inputs(Shapes.of(1, q_len=20, k_len=20 + ahead, d=16), device=flash_device)
    check_band(inputs, True, None)


@interpreted
@pytest.mark.parametrize("side", SIDES)
def test_the_sides_of_a_window_that_cross_tiles(flash_device, side):
    """In 16 bits, where tiles of rows that see all keys are not masked."""
    inputs = make_inputs(Shapes.of(1, q_len=36, d=16), dtype=torch.float16, device=flash_device)
    check_band(inputs, False, (side, None))
    check_band(inputs, False, (None, side))


@pytest.mark.parametrize("options", [(1, 1), (2, 3), (4, 1), (4, 4), (8, 1), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.gpu
def test_results_are_within_the_budget_for_every_pipeline(options, dtype, ahead):
    inputs = make_inputs(Shapes.of(1, q_len=515, k_len=700, d=64, q_heads=2), dtype=dtype, device="cuda")
    check("flash", inputs, causal=True, during=tiled(64, 32, *options, ahead))


@pytest.mark.parametrize("changed", ["forward", "dq", "dkdv"])
def test_a_pin_reaches_the_kernel_it_names(monkeypatch, flash_device, changed):
    """Seen by the number of programs, in calls that otherwise have a plan already."""
    grids = {}

    def watch(name):
        describe = getattr(plans, f"{name}_launch")

        def watched(*args):
            launch = describe(*args)
            grids[name] = launch.grid[0]
            return launch

        monkeypatch.setattr(plans, f"{name}_launch", watched)

    for name in ("forward", "dq", "dkdv"):
        watch(name)
    inputs = make_inputs(Shapes.of(1, q_len=128, d=16), dtype=torch.float16, device=flash_device)
    attend = partial(attention, impl="flash")
    with tiled(128, 128, 4, 2):
        evaluate(attend, inputs)
        assert grids == {"forward": 1, "dq": 1, "dkdv": 1}
        with portable(**{changed: TileConfig(32, 32, 4, 2)}):
            evaluate(attend, inputs)
        assert grids == {"forward": 1, "dq": 1, "dkdv": 1} | {changed: 4}
