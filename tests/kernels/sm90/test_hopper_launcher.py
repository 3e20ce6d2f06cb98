"""How launches for Hopper keep compiled kernels, encoded descriptors and workspaces, without a GPU."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cs336_systems.kernels import launching
from cs336_systems.kernels.launching import Launch, Launcher
from cs336_systems.kernels.sm90 import backend

from ..anew import FakeKernel


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

    monkeypatch.setattr(launching, "INTERPRETED", False)
    monkeypatch.setattr(launching, "runner_of", runner_of)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    descriptor = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout)
    return Launch((3, 1), (descriptor, x), (5,), {"TILE": 64}, {"num_warps": 4}), encoded, launched


def test_descriptors_are_encoded_once_for_an_address(fake_launch):
    launch, encoded, launched = fake_launch
    kernel = FakeKernel()
    run = Launcher(kernel)
    for addresses in ((16, 16), (32, 16), (48, 16), (32, 16), (32, 64)):
        run(addresses, lambda: launch)
    assert len(kernel.compiled) == 1
    run((32, 24), lambda: launch)
    assert len(kernel.compiled) == 2, "Triton compiles another kernel for pointers that are not multiples of 16 bytes"
    assert encoded == [(32, 0), (48, 0)]
    expected = [(32, 16), (48, 16), (32, 16), (32, 64)]
    assert launched == [(f"map of {x}", 64, 64, y, 5, 64) for x, y in expected]


def test_a_launcher_is_called_while_another_thread_compiles(fake_launch, monkeypatch):
    """Another thread's call falls into each step of the first launch: it finds all of it, or compiles too."""
    launch, _, launched = fake_launch
    for step in ("_alignment", "runner_of"):
        kernel, original, first = FakeKernel(), getattr(launching, step), itertools.count()
        run = Launcher(kernel)

        def interrupted(*arguments, run=run, original=original, first=first):
            if next(first) == 0:
                with ThreadPoolExecutor(1) as other:
                    other.submit(run, (16, 32), lambda: launch).result(timeout=60)
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(launching, step, interrupted)
            run((16, 32), lambda: launch)
        run((16, 32), lambda: launch)
        assert len(kernel.compiled) + len(launched) == 3
        launched.clear()


def test_workspaces(monkeypatch):
    """One is kept for each device and stream while it is large enough; a captured graph gets its own."""
    is_capturing, stream, cpu = False, 7, torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(backend, "raw_stream", lambda index: stream)
    monkeypatch.setattr(backend, "_workspaces", {})
    monkeypatch.setattr(backend, "_new_kept_workspace", backend._new_workspace)
    first = backend.workspace_for(cpu, 10)
    assert first[0] == 0
    assert backend.workspace_for(cpu, first.numel() - 1) is first
    larger = backend.workspace_for(cpu, first.numel())
    assert larger.numel() > first.numel()
    assert larger[0] == 0
    assert backend.workspace_for(cpu, 10) is larger
    stream = 8
    other = backend.workspace_for(cpu, 10)
    assert other is not larger
    is_capturing = True
    captured = backend.workspace_for(cpu, 10)
    assert captured is not other
    assert captured.numel() == 11
    assert captured[0] == 0
