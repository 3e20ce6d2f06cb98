"""Launches are kept by the alignment of their operands; a repeated launch passes addresses and encoded descriptors."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cs336_systems.kernels import launching
from cs336_systems.kernels.launching import Launch, Launcher, is_elsewhere
from cs336_systems.kernels.versions import compile_options


class FakeKernel:
    """A kernel, and what compiling it returns. Records how it was compiled and what each launch passed."""

    arg_names = ("x", "y", "length", "TILE")

    def __init__(self):
        self.compiled, self.launched, self.encoded = [], [], []

    def __getitem__(self, grid):
        def compile_and_run(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        return compile_and_run

    def encode(self, descriptor, number):
        self.encoded.append((descriptor.base.data_ptr(), number))
        return [f"map of {descriptor.base.data_ptr()}", *descriptor.shape]


@pytest.fixture
def kernel(monkeypatch):
    """A fake kernel, compiled rather than interpreted."""

    def runner_of(compiled, grid):
        return lambda *args: compiled.launched.append((grid, args)), compiled.encode

    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "runner_of", runner_of)
    return FakeKernel()


def describe(tensor="tensor", other=None, **options):
    return Launch((7, 1), (tensor, other), (5,), {"TILE": 64}, {"num_warps": 4, **options})


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


def with_a_descriptor():
    """A launch with one descriptor, as the kernels for Hopper have, and one pointer."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    return describe(TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout), x)


def test_descriptors_are_encoded_once_for_an_address(kernel):
    run = Launcher(kernel)
    for addresses in ((16, 16), (32, 16), (48, 16), (32, 16), (32, 64)):
        run(addresses, with_a_descriptor)
    assert len(kernel.compiled) == 1
    run((32, 24), with_a_descriptor)
    assert len(kernel.compiled) == 2, "Triton compiles another kernel for pointers that are not multiples of 16 bytes"
    assert kernel.encoded == [(32, 0), (48, 0)]
    expected = [(32, 16), (48, 16), (32, 16), (32, 64)]
    assert kernel.launched == [((7, 1), (f"map of {x}", 64, 64, y, 5, 64)) for x, y in expected]


@pytest.mark.parametrize("step", ["_alignment", "runner_of"])
def test_a_launcher_is_called_while_another_thread_compiles(kernel, monkeypatch, step):
    """Another thread's call falls into each step of the first launch: it finds all of it, or compiles too."""
    run, original, first = Launcher(kernel), getattr(launching, step), itertools.count()

    def interrupted(*arguments):
        if next(first) == 0:
            with ThreadPoolExecutor(1) as other:
                other.submit(run, (16, 32), with_a_descriptor).result(timeout=60)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(launching, step, interrupted)
        run((16, 32), with_a_descriptor)
    run((16, 32), with_a_descriptor)
    assert len(kernel.compiled) + len(kernel.launched) == 3


def test_another_device_than_the_current_one_is_elsewhere(monkeypatch):
    monkeypatch.setattr(launching, "current_device", lambda: 1)
    assert [is_elsewhere(torch.device(device)) for device in ("cpu", "cuda:1", "cuda:0")] == [False, False, True]
