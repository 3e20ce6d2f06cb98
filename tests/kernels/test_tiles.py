"""Any tiling computes the same thing, whatever divides whatever."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.kernels import tuning
from cs336_systems.kernels.triton import launch
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs, poisoned_memory

TILES = [(16, 16), (16, 64), (64, 16), (32, 128), (128, 32)]
MASKS = [False, "top_left", "bottom_right"]
SHAPES = {
    "longer_queries": Shapes.of(1, q_len=75, k_len=49, d=16, q_heads=2, kv_heads=1),
    "longer_keys": Shapes.of(1, q_len=33, k_len=130, d=20, dv=40),
    "whole_tiles": Shapes.of(1, q_len=64, k_len=128, d=16),
}


def tilings():
    """Every tile with every mask in both dtypes. Shapes take turns: each meets every tile, mask and dtype too.

    So do scores that are computed a step ahead and those that are not.
    """
    cases = []
    for row, tile in enumerate(TILES):
        for column, causal in enumerate(MASKS):
            for turn, dtype in enumerate([torch.float16, torch.float32]):
                name = [*SHAPES][(row + column + turn) % len(SHAPES)]
                ahead = (row + column) % 2 == turn
                case = f"{tile[0]}x{tile[1]}-{causal or 'full'}-{str(dtype).removeprefix('torch.')}-{name}"
                case += "-ahead" if ahead else ""
                cases.append(pytest.param(TileConfig(*tile, 4, 2, ahead), causal, dtype, SHAPES[name], id=case))
    return cases


@pytest.mark.parametrize(("tile", "causal", "dtype", "shapes"), tilings())
def test_results_are_within_the_budget_for_every_tile(flash_device, tile, causal, dtype, shapes):
    inputs = make_inputs(shapes, dtype=dtype, device=flash_device)
    with tuning.pin(forward=tile, dq=tile, dkdv=tile), poisoned_memory():
        results = evaluate(partial(attention, causal=causal, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=causal)


@pytest.mark.parametrize("options", [(1, 1), (2, 3), (4, 1), (4, 4), (8, 1), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.gpu
def test_results_are_within_the_budget_for_every_pipeline(options, dtype, ahead):
    inputs = make_inputs(Shapes.of(1, q_len=515, k_len=700, d=64, q_heads=2), dtype=dtype, device="cuda")
    config = TileConfig(64, 32, *options, ahead)
    with tuning.pin(forward=config, dq=config, dkdv=config):
        results = evaluate(partial(attention, causal=True, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=True)


@pytest.mark.parametrize("changed", ["forward", "dq", "dkdv"])
def test_a_pin_reaches_the_kernel_it_names(monkeypatch, flash_device, changed):
    """By the number of programs launched, in calls that are otherwise remembered."""
    grids = {}

    def watch(name):
        describe = getattr(launch, f"describe_{name}")

        def described(*args):
            launched = describe(*args)
            grids[name] = launched.grid[0]
            return launched

        monkeypatch.setattr(launch, f"describe_{name}", described)

    for name in ("forward", "dq", "dkdv"):
        watch(name)
    inputs = make_inputs(Shapes.of(1, q_len=128, d=16), dtype=torch.float16, device=flash_device)
    attend = partial(attention, impl="flash")
    coarse, fine = TileConfig(128, 128, 4, 2), TileConfig(32, 32, 4, 2)
    with tuning.pin(forward=coarse, dq=coarse, dkdv=coarse):
        evaluate(attend, inputs)
        assert grids == {"forward": 1, "dq": 1, "dkdv": 1}
        with tuning.pin(**{changed: fine}):
            evaluate(attend, inputs)
        assert grids == {"forward": 1, "dq": 1, "dkdv": 1} | {changed: 4}
