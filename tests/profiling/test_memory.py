"""What is held for a backward pass, peaks, and what an exception means."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cs336_systems.profiling import memory
from cs336_systems.profiling.memory import (
    ALLOCATOR,
    SAVED_TENSORS,
    MemoryReading,
    available_bytes,
    collection_paused,
    forward_memory,
    is_out_of_memory,
    training_memory,
    without_frames,
)


def test_on_a_cpu_saved_tensors_are_counted_once_and_inputs_are_not():
    x = torch.randn(256, requires_grad=True)
    y = torch.randn(256, requires_grad=True)

    def forward() -> torch.Tensor:
        product = x * y  # saves x and y: inputs
        return (
            product.exp().sin()
        )  # saves exp's output twice, as exp's own and as sin's input; the result is the output

    reading = training_memory(forward, lambda output: None, inputs=(x, y), device="cpu")
    assert reading == MemoryReading(held_bytes=2 * 256 * 4, peak_bytes=None, method=SAVED_TENSORS)
    assert reading.held_mib == 2 * 256 * 4 / 2**20
    assert reading.peak_mib is None


def test_on_a_cpu_a_forward_has_no_figures():
    assert forward_memory(lambda: None, device="cpu") == MemoryReading(None, None, "")


class FakeAllocator:
    """Stands for torch.cuda's counters: the forward allocates 100 and keeps 60, the backward goes 30 higher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 1000
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def reset(self, device: object) -> None:
        self.peak = self.allocated

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def forward(self) -> torch.Tensor:
        self.take(100)
        self.allocated -= 40
        return torch.zeros(())

    def backward(self, output: torch.Tensor) -> None:
        self.take(90)


def test_on_cuda_figures_are_differences_to_what_was_allocated(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    reading = training_memory(allocator.forward, allocator.backward, inputs=(), device="cuda")
    assert reading == MemoryReading(held_bytes=60, peak_bytes=150, method=ALLOCATOR)


def test_on_cuda_a_forward_has_a_peak(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    allocator.take(5000)
    allocator.allocated = 1000  # an earlier peak is not this one's
    assert forward_memory(allocator.forward, device="cuda") == MemoryReading(None, 100, ALLOCATOR)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_allocator_counts_what_a_known_graph_keeps():
    # Of 1 MiB, the most for which the allocator splits any larger piece of memory: it counts no more than is asked for.
    x = torch.randn(2**18, device="cuda", requires_grad=True)
    gradient = torch.ones_like(x)
    reading = training_memory(
        lambda: x.exp().sin(),  # keeps exp's output and the output
        lambda output: torch.autograd.grad(output, x, gradient),
        inputs=(x,),
        device="cuda",
    )
    assert reading.held_bytes == 2 * x.nbytes
    assert reading.peak_bytes is not None
    assert reading.peak_bytes >= 3 * x.nbytes


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_errors_that_say_that_memory_ran_out(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory is no value")])
def test_errors_that_do_not(error):
    assert not is_out_of_memory(error)


def test_the_cause_of_an_error_counts():
    error = RuntimeError("compiled function failed")
    error.__cause__ = torch.OutOfMemoryError("gone")
    assert is_out_of_memory(error)


def test_causes_in_a_cycle_end():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_an_exception_without_frames_frees_their_tensors():
    held: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise RuntimeError("outer") from inner

    kept: Exception | None = None
    with collection_paused():
        try:
            fail()
        except RuntimeError as error:
            kept = without_frames(error)
        assert kept is not None
        assert held[0]() is None


def test_collection_is_paused_and_comes_back():
    assert gc.isenabled()
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_available_memory_of_this_machine():
    available = available_bytes("cpu")
    assert available is not None
    assert available > 2**20
    assert available_bytes("meta") is None


def test_available_memory_of_a_cuda_device_counts_the_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert available_bytes("cuda") == 130


def test_the_control_group_limits_what_is_available(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\n")
    assert memory._control_group_available(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._control_group_available(tmp_path) is None
    assert memory._control_group_available(tmp_path / "nowhere") is None


def test_the_kernels_figure_of_available_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert memory._kernel_available(meminfo) == 7 * 1024
    whole = memory._kernel_available(tmp_path / "nowhere")
    assert whole is None or whole > 2**20
