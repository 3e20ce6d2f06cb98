"""How launches for Hopper keep compiled kernels, encoded descriptors and workspaces, without a GPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cs336_systems.kernels.launching import Launch
from cs336_systems.kernels.sm90 import launcher, workspace

from .anew import FakeKernel


@pytest.fixture
def fake_launch(monkeypatch):
    """A launch with one descriptor and one pointer; what was encoded; what was launched."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    encoded, launched = [], []

    def runner_of(compiled, grid):
        def encode(descriptor, number):
            encoded.append((descriptor.base.data_ptr(), number))
            return [f"map of {descriptor.base.data_ptr()}", *descriptor.shape]

        return lambda *arguments: launched.append(arguments), encode

    monkeypatch.setattr(launcher, "runner_of", runner_of)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    descriptor = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout)
    return Launch((3, 1), (descriptor, x), (5,), {"TILE": 64}, {"num_warps": 4}), encoded, launched


def test_descriptors_are_encoded_once_for_an_address(fake_launch):
    launch, encoded, launched = fake_launch
    kernel = FakeKernel()
    run = launcher.Launcher(kernel)
    assert not run((16, 16))
    run.first(launch)
    for addresses in ((32, 16), (48, 16), (32, 16), (32, 64)):
        assert run(addresses)
    assert not run((32, 24)), "Triton compiles another kernel for pointers that are not multiples of 16 bytes"
    assert len(kernel.compiled) == 1
    assert encoded == [(32, 0), (48, 0)]
    expected = [(32, 16), (48, 16), (32, 16), (32, 64)]
    assert launched == [(f"map of {x}", 64, 64, y, 5, 64) for x, y in expected]


def test_a_launcher_is_called_while_another_thread_compiles(fake_launch, monkeypatch):
    """Another thread's call falls into each step of the first launch: it finds all of it, or nothing."""
    launch, _, launched = fake_launch
    found = []
    for step in ("_alignment", "runner_of"):
        run = launcher.Launcher(FakeKernel())
        original = getattr(launcher, step)
        first = itertools.count()

        def interrupted(*arguments, run=run, original=original, first=first):
            if next(first) == 0:
                with ThreadPoolExecutor(1) as other:
                    found.append(other.submit(run, (16, 32)).result(timeout=60))
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(launcher, step, interrupted)
            run.first(launch)
        assert run((16, 32))
    assert found == [False, False]
    assert len(launched) == 2


def test_workspaces(monkeypatch):
    """One is kept for each device and stream while it is large enough; a captured graph gets its own."""
    is_capturing, stream, cpu = False, 7, torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(workspace, "raw_stream", lambda index: stream)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(workspace, "_new_kept", workspace._new)
    first = workspace.workspace_for(cpu, 10)
    assert first[0] == 0
    assert workspace.workspace_for(cpu, first.numel() - 1) is first
    larger = workspace.workspace_for(cpu, first.numel())
    assert larger.numel() > first.numel()
    assert larger[0] == 0
    assert workspace.workspace_for(cpu, 10) is larger
    stream = 8
    other = workspace.workspace_for(cpu, 10)
    assert other is not larger
    is_capturing = True
    captured = workspace.workspace_for(cpu, 10)
    assert captured is not other
    assert captured.numel() == 11
    assert captured[0] == 0
