"""Launches are kept by the alignment of their operands; a repeated launch passes addresses."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels import launching
from cs336_systems.kernels.launching import Launch, Launcher, is_elsewhere
from cs336_systems.kernels.versions import compile_options

from .anew import FakeKernel


@pytest.fixture
def kernel(monkeypatch):
    """A fake kernel, compiled rather than interpreted."""

    def runner_of(compiled, grid):
        return lambda *args: compiled.launched.append((grid, args)), None

    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "runner_of", runner_of)
    return FakeKernel()


def describe(tensor="tensor", **options):
    return Launch((7, 1), (tensor, None), (5,), {"TILE": 64}, {"num_warps": 4, **options})


def test_a_repeated_launch_passes_addresses_and_kept_arguments(kernel):
    launcher = Launcher(kernel)
    launcher((32, None), describe, "first")
    assert kernel.compiled == [((7, 1), ("first", None, 5), {"TILE": 64, "num_warps": 4, **compile_options()})]
    for _ in range(2):
        launcher((48, None), lambda *_: pytest.fail("it was described already"), "second")
    assert kernel.launched == [((7, 1), (48, None, 5, 64))] * 2


def test_options_of_a_launch_override_the_defaults(kernel):
    Launcher(kernel)((32, None), lambda: describe(enable_fp_fusion=False))
    assert kernel.compiled[0][2]["enable_fp_fusion"] is False


@pytest.mark.parametrize("operands", [(33, 64), (40, 64), (32, 72), (33, 65), (32, (72, 5)), (32, (64, 16, None))])
def test_another_alignment_is_compiled_again(kernel, operands):
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((32, 64), describe)
        launcher(operands, describe)
    assert len(kernel.compiled) == 2
    assert [args[:2] for _, args in kernel.launched] == [(32, 64), operands]


def test_interpreted_launches_are_not_kept(kernel, monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", True)
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher((32, None), describe)
    assert len(kernel.compiled) == 2
    assert kernel.launched == []


def test_another_device_than_the_current_one_is_elsewhere(monkeypatch):
    monkeypatch.setattr(launching, "current_device", lambda: 1)
    assert [is_elsewhere(torch.device(device)) for device in ("cpu", "cuda:1", "cuda:0")] == [False, False, True]
