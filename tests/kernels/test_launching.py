"""Launches are remembered by everything that they depend on, and by nothing else for ever."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels import launching, tuning
from cs336_systems.kernels.launching import Launch, Launcher, Plans, is_elsewhere
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.kernels.versions import compile_options


class FakeKernel:
    """Stands for a kernel and for what compiling it returns: notes how it was compiled, and what each launch passed."""

    arg_names = ("x", "y", "length", "TILE")

    def __init__(self):
        self.compiled = []
        self.launched = []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        return compile_and_run


@pytest.fixture
def kernel(monkeypatch):
    """A fake kernel, compiled rather than interpreted."""

    def runner_of(compiled, grid):
        return lambda *args: compiled.launched.append((grid, args)), None

    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "runner_of", runner_of)
    return FakeKernel()


def describe(**options):
    return Launch((7, 1), ("tensor", None), (5,), {"TILE": 64}, {"num_warps": 4, **options})


def test_a_repeated_launch_passes_addresses_and_what_was_remembered(kernel):
    launcher = Launcher(kernel)
    launcher((32, None), describe)
    [(grid, arguments, keywords)] = kernel.compiled
    assert (grid, arguments) == ((7, 1), ("tensor", None, 5))
    assert keywords == {"TILE": 64, "num_warps": 4, **compile_options()}
    for _ in range(2):
        launcher((48, None), lambda: pytest.fail("it was described already"))
    assert kernel.launched == [((7, 1), (48, None, 5, 64))] * 2


def test_options_of_a_launch_win_over_those_of_every_kernel(kernel):
    Launcher(kernel)((32, None), lambda: describe(enable_fp_fusion=False))
    assert kernel.compiled[0][2]["enable_fp_fusion"] is False


@pytest.mark.parametrize("addresses", [(33, 64), (40, 64), (32, 72), (33, 65)])
def test_another_alignment_is_compiled_anew(kernel, addresses):
    launcher = Launcher(kernel)
    launcher((32, 64), describe)
    launcher(addresses, describe)
    assert len(kernel.compiled) == 2
    launcher((48, 80), describe)
    launcher(addresses, describe)
    assert len(kernel.compiled) == 2
    assert [args[:2] for _, args in kernel.launched] == [(48, 80), addresses]


def test_interpreted_launches_are_not_remembered(kernel, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", True)
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((32, None), describe)
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_plans_are_made_once_for_each_key():
    plans: Plans[list[str]] = Plans()
    made = [plans.get(key, lambda key=key: [key]) for key in ("a", "b", "a", "b")]
    assert made == [["a"], ["b"], ["a"], ["b"]]
    assert made[0] is made[2]
    assert made[1] is made[3]


def test_a_pin_makes_plans_anew():
    plans: Plans[list[str]] = Plans()
    before = plans.get("a", list)
    with tuning.pin(dq=TileConfig(16, 16, 1, 1)):
        inside = plans.get("a", list)
        assert plans.get("a", list) is inside
    after = plans.get("a", list)
    assert len({id(before), id(inside), id(after)}) == 3


def test_no_more_plans_are_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(launching, "MOST_PLANS", 3)
    plans: Plans[list[int]] = Plans()
    for number in range(20):
        made = plans.get(number, lambda number=number: [number])
        assert made == [number]
        assert plans.get(number, lambda: pytest.fail("it was made just now")) is made
        assert len(plans._plans) <= 3


def test_another_device_than_the_current_one_is_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [is_elsewhere(torch.device(device)) for device in ("cpu", "cuda:1", "cuda:0")] == [False, False, True]
