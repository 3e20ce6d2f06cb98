"""Held and peak memory, and exceptions that mean that memory ran out."""

from __future__ import annotations

import weakref

import pytest
import torch

from cs336_systems.kernels.garbage import collection_paused
from cs336_systems.profiling.memory import (
    ALLOCATOR,
    SAVED_TENSORS,
    MemoryUsage,
    is_out_of_memory,
    measure_memory,
    without_frames,
)


def test_on_a_cpu_each_saved_storage_counts_once_and_inputs_do_not():
    x, y = (torch.randn(256, requires_grad=True) for _ in range(2))
    # x * y saves both inputs; exp and sin save exp's result; sin's result is the output.
    usage = measure_memory(lambda: (x * y).exp().sin(), lambda out: None, inputs=(x, y), device="cpu")
    assert usage == MemoryUsage(held_bytes=2 * x.nbytes, method=SAVED_TENSORS)
    assert measure_memory(lambda: (x * y).exp(), device="cpu") == MemoryUsage()


class FakeAllocator:
    """Replaces torch.cuda's counters: the forward allocates 100 and keeps 60, the backward allocates 90 more."""

    def __init__(self, monkeypatch):
        self.allocated, self.peak = 1000, 5000  # an earlier peak
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        self.grad_enabled = []

    def reset(self, device):
        self.peak = self.allocated

    def take(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def forward(self):
        self.grad_enabled.append(torch.is_grad_enabled())
        self.take(100)
        self.allocated -= 40
        return torch.zeros(())


def test_on_cuda_the_counters_are_relative_to_what_was_allocated_before(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    assert measure_memory(allocator.forward, device="cuda") == MemoryUsage(1000, None, 100, 2200, ALLOCATOR)
    allocator.allocated = 1000
    usage = measure_memory(allocator.forward, lambda out: allocator.take(90), device="cuda")
    assert usage == MemoryUsage(1000, 60, 150, 2300, ALLOCATOR)
    allocator.allocated = 1000
    update = lambda: allocator.take(200)  # noqa: E731
    assert measure_memory(allocator.forward, lambda out: None, update, device="cuda").peak_bytes == 260
    assert allocator.grad_enabled == [False, True, True]


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_counts_what_a_known_graph_keeps():
    # Of 1 MiB: up to there the allocator splits larger blocks, and counts no more than requested.
    x = torch.randn(2**18, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    usage = measure_memory(
        lambda: x.exp().sin(), lambda output: torch.autograd.grad(output, x, gradient), device="cuda", inputs=(x,)
    )
    assert usage.held_bytes == 2 * x.nbytes  # exp's result and the output
    assert usage.peak_bytes >= 3 * x.nbytes
    assert usage.reserved_bytes >= usage.before_bytes + usage.peak_bytes


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory is no value"), False),
    ],
)
def test_errors_that_mean_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) == expected
    outer = RuntimeError("compiled function failed")
    outer.__cause__, error.__cause__ = error, outer  # a cycle
    assert is_out_of_memory(outer) == expected


def test_an_exception_without_frames_frees_their_tensors():
    held = []

    def fail():
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise RuntimeError("outer") from inner

    kept = None
    with collection_paused():
        try:
            fail()
        except RuntimeError as error:
            kept = without_frames(error)
        assert str(kept) == "outer"
        assert held[0]() is None
