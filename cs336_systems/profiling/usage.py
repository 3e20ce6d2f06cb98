"""Bytes of one pass through a model: what stands before it, its peak, what it holds for the backward, what is reserved.

On CUDA these are the allocator's counters, of a pass that nothing watches. Elsewhere they follow from the tensors that
were tracked in a recording (see `recording`), and nothing is known of what is reserved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .allocations import History
from .memory import ALLOCATOR, collection_paused, release_memory
from .recording import TRACKED_TENSORS

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
"""The phases of a step."""


@dataclass(frozen=True)
class PassMemory:
    """Memory of a pass, in bytes.

    Attributes:
        allocated_bytes: before it: parameters, and what the optimizer keeps.
        peak_bytes: the most that was allocated at any time in it, with what was there before.
        held_bytes: by how much more is allocated after its forward than before it; None without a graph.
        reserved_bytes: the most that the allocator had of the device, tensors in it or not; None where none counts.
        method: `ALLOCATOR` or `TRACKED_TENSORS`.
    """

    allocated_bytes: int
    peak_bytes: int
    held_bytes: int | None
    reserved_bytes: int | None
    method: str


def cuda_memory_of(
    forward: Callable[[], Tensor],
    backward: Callable[[Tensor], object] | None,
    update: Callable[[], object] | None,
    device: torch.device,
) -> PassMemory:
    """The counters of CUDA's allocator for a forward, a backward of what it returned if any, and an update if any.

    Call it after a pass of the same kind, without gradients left. A forward without a backward runs under `no_grad`.
    """
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
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return PassMemory(before, peak, held, reserved, ALLOCATOR)


def tracked_memory_of(history: History) -> PassMemory:
    """The same of the last pass of a recording whose phases are `FORWARD`, and `BACKWARD` and `OPTIMIZER` if any.

    Raises:
        KeyError: there is no forward.
    """
    levels = [history.standing_before, *history.curve()]
    first = history.phase(FORWARD)
    before, after = levels[first.begin], levels[first.end]
    trained = any(phase.name == BACKWARD for phase in history.phases)
    return PassMemory(before, max(levels[first.begin :]), after - before if trained else None, None, TRACKED_TENSORS)
