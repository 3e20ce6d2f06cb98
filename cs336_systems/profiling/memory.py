"""Peak memory, memory held for the backward pass, and running out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.garbage import collection_paused

ALLOCATOR = "cuda allocator"
SAVED_TENSORS = "saved tensors"

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class MemoryUsage:
    """Memory of a training step or a forward pass, in bytes; None if unknown.

    Attributes:
        before_bytes: allocated before: parameters, optimizer state, inputs.
        held_bytes: allocated by the forward and not yet freed: the output, and the tensors saved for the backward.
        peak_bytes: the maximum above ``before_bytes``.
        reserved_bytes: the maximum that the caching allocator has reserved from the driver.
        method: "cuda allocator", "saved tensors", "tracked tensors" (`MemoryRecorder`), or "" if nothing is known.
    """

    before_bytes: int | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    method: str = ""


def measure_memory(
    forward: Callable[[], Any],
    backward: Callable[[Any], object] | None = None,
    update: Callable[[], object] | None = None,
    *,
    device: torch.device | str,
    inputs: Iterable[Tensor] = (),
) -> MemoryUsage:
    """Memory of ``forward()``, then ``backward(output)`` and ``update()`` if given.

    Without ``backward`` the forward runs under ``torch.no_grad()``. On CUDA these are the caching allocator's counters,
    which round each allocation up to 512 bytes, and above 1 MiB by up to 1 MiB. Run the same step once before, since
    libraries allocate workspaces at first use, and clear gradients. Elsewhere only ``held_bytes`` is known: the size of
    the output and of what autograd saves, each storage once, without those of ``inputs``. The backward does not run.
    """
    if torch.device(device).type != "cuda":
        if backward is None:
            return MemoryUsage()
        return MemoryUsage(held_bytes=_saved_bytes(forward, inputs), method=SAVED_TENSORS)
    with collection_paused():
        release_memory(device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        held = None
        with torch.set_grad_enabled(backward is not None):
            output = forward()
        if backward is not None:
            held = torch.cuda.memory_allocated(device) - before
            backward(output)
        del output
        if update is not None:
            update()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return MemoryUsage(before, held, peak, torch.cuda.max_memory_reserved(device), ALLOCATOR)


def _saved_bytes(forward: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    storages: dict[int, Tensor] = {}  # keeps them alive: a freed one could give its address to a later one

    def save(tensor: Tensor) -> None:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())

    # The graph holds None instead of tensors, and is discarded.
    with torch.autograd.graph.saved_tensors_hooks(save, lambda nothing: nothing):
        save(forward())
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def release_memory(device: torch.device | str) -> None:
    """Collect garbage, and return the caching allocator's unused blocks to the driver."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _with_causes(error: BaseException) -> list[BaseException]:
    """An exception and all its causes, which can form a cycle."""
    found: dict[int, BaseException] = {}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in found:
            found[id(current)] = current
            pending += [current.__cause__, current.__context__]
    return list(found.values())


def without_frames(error: Exception) -> Exception:
    """Clear the tracebacks of an exception and its causes, whose frames keep the failed call's tensors alive."""
    for each in _with_causes(error):
        each.__traceback__ = None
    return error


_OUT_OF_MEMORY_PHRASES = (
    *("out of memory", "not enough memory", "can't allocate memory"),
    *("cublas_status_alloc_failed", "cuda_error_out_of_memory"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or one of its causes, means that device or host memory ran out."""
    return any(
        isinstance(each, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(each, RuntimeError) and any(phrase in str(each).lower() for phrase in _OUT_OF_MEMORY_PHRASES))
        for each in _with_causes(error)
    )
