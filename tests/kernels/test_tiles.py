"""Every tiling computes the same, whatever divides whatever."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.kernels.triton import plans
from cs336_systems.kernels.triton.tiles import TileConfig
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs, poisoned_memory

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
    with tiled(*tile), poisoned_memory():
        results = evaluate(partial(attention, causal=causal, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=causal)


@pytest.mark.parametrize("options", [(1, 1), (2, 3), (4, 1), (4, 4), (8, 1), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.gpu
def test_results_are_within_the_budget_for_every_pipeline(options, dtype, ahead):
    inputs = make_inputs(Shapes.of(1, q_len=515, k_len=700, d=64, q_heads=2), dtype=dtype, device="cuda")
    with tiled(64, 32, *options, ahead):
        results = evaluate(partial(attention, causal=True, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=True)


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
