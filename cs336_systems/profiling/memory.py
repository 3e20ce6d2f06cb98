"""Memory that a computation holds for its backward pass, its peak, and what there is.

On CUDA the figures come from PyTorch's caching allocator and count the pieces of memory that tensors have, not the
segments reserved from the driver: each a multiple of 512 bytes, and above 1 MiB up to 1 MiB larger than was asked for,
where a larger piece was free. Elsewhere no allocator keeps such counts: what is held is then the size of the tensors
that autograd saved, and there is no peak. `MemoryReading.method` says which it was.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

ALLOCATOR = "cuda allocator"
SAVED_TENSORS = "saved tensors"

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class MemoryReading:
    """Bytes held for the backward pass, bytes at the peak, and the method; None for what could not be measured."""

    held_bytes: int | None
    peak_bytes: int | None
    method: str

    @property
    def held_mib(self) -> float | None:
        """Held memory in MiB."""
        return None if self.held_bytes is None else self.held_bytes / MIB

    @property
    def peak_mib(self) -> float | None:
        """Peak memory in MiB."""
        return None if self.peak_bytes is None else self.peak_bytes / MIB


def forward_memory(forward: Callable[[], object], *, device: torch.device | str) -> MemoryReading:
    """The peak of `forward()` above what was allocated before it. Call it under `no_grad`, and warmed up.

    A first call allocates workspaces that stay (cuBLAS takes 32 MiB); they would be counted.
    """
    if torch.device(device).type != "cuda":
        return MemoryReading(held_bytes=None, peak_bytes=None, method="")
    with collection_paused():
        before = _start_counting(device)
        output = forward()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    del output
    return MemoryReading(held_bytes=None, peak_bytes=peak, method=ALLOCATOR)


def training_memory(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], object],
    *,
    inputs: Iterable[torch.Tensor],
    device: torch.device | str,
) -> MemoryReading:
    """What `forward()` leaves allocated for the backward pass, and the peak over forward and backward together.

    Held: the output and everything its graph keeps alive, after the forward and before the backward. Peak: the most at
    any time from the start of the forward to the end of the backward, gradients included. Both are above what was
    allocated before, so they leave out the inputs and the gradient of the output, which must exist already.
    """
    if torch.device(device).type != "cuda":
        return MemoryReading(_saved_bytes(forward, inputs), peak_bytes=None, method=SAVED_TENSORS)
    with collection_paused():
        before = _start_counting(device)
        output = forward()
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device) - before
        gradients = backward(output)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    del output, gradients
    return MemoryReading(held_bytes=held, peak_bytes=peak, method=ALLOCATOR)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python's cycle collector from running, as it would at any allocation.

    Tensors in a cycle of garbage, freed halfway through, would make memory figures too small; and a collection takes
    long enough to be seen in a time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _start_counting(device: torch.device | str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _saved_bytes(forward: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages that the graph of `forward()` saves, with its output and without its inputs."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    # The tensors are kept until the end: a storage that was freed could lend its address to the next one.
    kept: list[torch.Tensor] = []
    total = 0

    def count(tensor: torch.Tensor) -> None:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            kept.append(tensor.detach())
            total += storage.nbytes()

    # Nothing is packed, so the graph cannot be used: it is thrown away with the output.
    with torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        output = forward()
    count(output)
    return total


def release_memory(device: torch.device | str) -> None:
    """Free what nothing refers to any more, and give cached blocks back to the driver."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def without_frames(error: Exception) -> Exception:
    """The same exception, no longer holding on to the frames it passed through, nor to the tensors in them.

    After running out of memory the frames of the failed call keep their tensors alive for as long as its traceback.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = None
        pending += [current.__cause__, current.__context__]
    return error


_OUT_OF_MEMORY_PHRASES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cublas_status_alloc_failed",
    "cuda_error_out_of_memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, says that memory ran out, on a device or on the host."""
    current: BaseException | None = error
    for _ in range(10):  # causes can form a cycle
        if current is None:
            return False
        if isinstance(current, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(current, RuntimeError) and any(
            phrase in str(current).lower() for phrase in _OUT_OF_MEMORY_PHRASES
        ):
            return True
        current = current.__cause__ or current.__context__
    return False


def available_bytes(device: torch.device | str) -> int | None:
    """Memory that can be had on the device now without swapping, in bytes; None where it cannot be read.

    For a CPU it is the smaller of what the kernel calls available and what the control group still allows.
    """
    where = torch.device(device)
    if where.type == "cuda":
        free, _ = torch.cuda.mem_get_info(where)
        cached = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return int(free + cached)
    if where.type != "cpu":
        return None
    known = [size for size in (_kernel_available(), _control_group_available()) if size is not None]
    return min(known) if known else None


def _kernel_available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        # Not Linux: all the memory there is, less a quarter for everything else that runs.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    except (AttributeError, OSError, ValueError):
        return None


def _control_group_available(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # The group's figure counts its page cache, of which the inactive part is given up on demand.
        used = int((folder / "memory.current").read_text()) - int(statistics["inactive_file"])
        return max(0, int(limit) - used)
    except (OSError, ValueError, KeyError):
        return None
