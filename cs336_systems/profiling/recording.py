"""Every allocation of a stretch of work, with where it comes from, as a snapshot that torch's viewer reads too.

On CUDA it is the allocator's own history (``torch.cuda.memory._record_memory_history`` and ``_snapshot``). Elsewhere
no allocator keeps one. There the storages of the tensors that operations return are followed from their first
appearance until they are freed, and written down in the same form. That is not an allocator's account: what an
operation allocates and frees inside itself (workspaces, temporaries of a kernel) is not seen, nor are rounding,
caching, and memory that belongs to no tensor.

Operations are dispatched through a function that is named after their `Origin`. In the backward pass, which on a GPU
runs in a thread without the stack of the model, that is the origin of the forward operation whose gradient it is.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.torch_names import (
    TorchDispatchMode,
    current_node,
    memory_history,
    next_node_number,
    node_number,
    record_memory_history,
)
from .containers import tensors_in
from .origins import Frame, ModulePaths, Origin, named_call, stack, statement

ALLOCATOR_HISTORY = "cuda allocator's history"
TRACKED_TENSORS = "tracked tensors"
EXPLAINED = {
    ALLOCATOR_HISTORY: "Recorded is what CUDA's allocator allocated and freed.",
    TRACKED_TENSORS: "Recorded are the tensors that operations returned, until they were freed; what an operation "
    "allocates inside itself is not seen, nor what an allocator rounds up and keeps.",
}
"""What a recording is and is not, by its method."""
PHASE = "phase | "
"""What the frame of an allocation begins with that marks where a phase begins."""
END = "end"
GRADIENT, OPTIMIZER_STATE = "gradient", "optimizer state"
"""Owners of memory."""
OF_A_PARAMETER = " of a parameter"
"""What a copy's operation ends in: a cast to the dtype of autocast."""
_MOST_EVENTS = 1_000_000


@dataclass(frozen=True)
class Recording:
    """What was recorded.

    Attributes:
        snapshot: as ``torch.cuda.memory._snapshot`` returns it: pickled, https://docs.pytorch.org/memory_viz shows it.
        device_index: of which device in it.
        before_bytes: allocated when the recording began, as the allocator counts, which rounds up; what is in the
            snapshot are bytes that were asked for. Without an allocator's count, of the tensors that were met.
        owners: for each marker of a phase in turn, who owns the memory at an address then.
        method: `ALLOCATOR_HISTORY` or `TRACKED_TENSORS`.
    """

    snapshot: dict[str, Any]
    device_index: int
    before_bytes: int
    owners: tuple[dict[int, str], ...]
    method: str


class AllocationRecorder:
    """Records what happens inside ``with``; phases are begun by name.

    >>> with AllocationRecorder(model, device, optimizer) as recorder:
    ...     recorder.phase("forward")
    ...     loss = model(x).sum()
    ...     recorder.phase("backward")
    ...     loss.backward()
    >>> recorder.recording.before_bytes

    What runs inside must be eager: under a dispatch mode torch.compile compiles nothing. It takes longer than by
    itself, so nothing inside is to be timed. On CUDA the history of the whole process is recorded, that of an earlier
    recording removed.

    Args:
        model: whose modules and gradients are told apart.
        device: whose memory it is.
        optimizer: whose state is told apart.
    """

    def __init__(
        self, model: nn.Module, device: torch.device | str, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._owners: list[dict[int, str]] = []
        self._recording: Recording | None = None
        self._before = 0
        self._open = ExitStack()

    def __enter__(self) -> AllocationRecorder:
        paths = ModulePaths(self._model)
        parameters = {storage_key(parameter) for parameter in self._model.parameters()}
        self._storages = None if self._on_cuda else Storages(self._device)
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            record_memory_history("all", context="alloc", stacks="python", max_entries=_MOST_EVENTS, clear_history=True)
            self._open.callback(record_memory_history, None)
        else:
            self._before_tensors()
        self._open.enter_context(paths.followed())
        self._open.enter_context(_Labelling(paths, parameters, self._storages))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.phase(END)
                self._recording = self._taken()
        finally:
            self._open.close()

    @property
    def recording(self) -> Recording:
        """What was recorded. Raises RuntimeError before the end, and after an exception."""
        if self._recording is None:
            raise RuntimeError("recording must be read after the block has ended without an exception")
        return self._recording

    def phase(self, name: str) -> None:
        """What comes now belongs to the phase of this name."""
        self._owners.append(self._owned())
        if self._storages is None:
            # One byte, of which the stack is the news.
            named_call(PHASE + name, __file__, 1)(torch.empty, (1,), {"dtype": torch.uint8, "device": self._device})
        else:
            self._storages.mark(PHASE + name)

    def _taken(self) -> Recording:
        if self._storages is not None:
            before = self._before + self._storages.met_bytes
            return Recording(self._storages.snapshot(), 0, before, tuple(self._owners), TRACKED_TENSORS)
        torch.cuda.synchronize(self._device)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        snapshot = memory_history(index)
        return Recording(snapshot, index, self._before, tuple(self._owners), ALLOCATOR_HISTORY)

    def _before_tensors(self) -> None:
        standing = [*self._model.parameters(), *self._model.buffers(), *self._gradients(), *self._states()]
        for tensor in standing:
            if self._storages is not None:
                self._storages.meet(tensor)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]

    def _states(self) -> list[Tensor]:
        states = [] if self._optimizer is None else self._optimizer.state.values()
        return [tensor for state in states for tensor in state.values() if isinstance(tensor, Tensor)]

    def _owned(self) -> dict[int, str]:
        owned = {tensor.untyped_storage().data_ptr(): GRADIENT for tensor in self._gradients()}
        return owned | {tensor.untyped_storage().data_ptr(): OPTIMIZER_STATE for tensor in self._states()}


def storage_key(tensor: Tensor) -> int:
    """What is the same for all tensors of one storage, and for no others while it lives."""
    # There is one Python object for a storage, for as long as it lives.
    return id(tensor.untyped_storage())


class Storages:
    """Storages of a device's tensors, from when they appear until they are freed, as events of a snapshot."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}
        self._events: list[dict[str, Any]] = []
        self.met_bytes = 0

    def meet(self, tensor: Tensor) -> None:
        """A tensor that goes into an operation: unless it is known, it was there before."""
        if self._follow(tensor):
            self.met_bytes += tensor.untyped_storage().nbytes()

    def allocated(self, tensor: Tensor, frames: Callable[[], list[Frame]]) -> None:
        """A tensor that comes out of an operation: unless it is known, it is new."""
        if self._follow(tensor):
            _, address, size = self._live[storage_key(tensor)]
            self._note("alloc", address, size, frames())

    def mark(self, name: str) -> None:
        """Mark the place between two events."""
        self._note("alloc", 0, 1, [{"filename": __file__, "line": 1, "name": name}])
        self._note("free_completed", 0, 1, [])

    def snapshot(self) -> dict[str, Any]:
        """The events so far."""
        return {"segments": [], "device_traces": [list(self._events)], "allocator_settings": {}}

    def _follow(self, tensor: Tensor) -> bool:
        if tensor.device.type != self._device.type or type(tensor) not in (Tensor, nn.Parameter):
            return False
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._live or size == 0:
            return False
        freed = weakref.ref(storage, functools.partial(self._freed, key))
        self._live[key] = (freed, storage.data_ptr(), size)
        return True

    def _freed(self, key: int, reference: object) -> None:
        _, address, size = self._live.pop(key)
        self._note("free_requested", address, size, [])
        self._note("free_completed", address, size, [])

    def _note(self, action: str, address: int, size: int, frames: list[Frame]) -> None:
        now = time.time_ns() // 1000
        event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, "time_us": now}
        self._events.append(event)


class _Labelling(TorchDispatchMode):
    """Calls every operation through a function that is named after its origin."""

    def __init__(self, paths: ModulePaths, parameters: set[int], storages: Storages | None) -> None:
        super().__init__()
        self._paths, self._parameters, self._storages = paths, parameters, storages
        self._of_node: dict[int, tuple[str, int, str, str]] = {}
        self._named = functools.lru_cache(maxsize=None)(named_call)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        origin = self._origin(operation, args)
        call = self._named(origin.name, origin.filename, origin.line)
        storages = self._storages
        if storages is None:
            return call(operation, args, kwargs)
        for tensor in tensors_in((args, kwargs)):
            storages.meet(tensor)
        result = call(operation, args, kwargs)
        for tensor in tensors_in(result):
            storages.allocated(tensor, lambda: [origin.frame(), *stack()])
        return result

    def _origin(self, operation: Any, args: tuple[Any, ...]) -> Origin:
        name = str(operation.overloadpacket)
        if name == "aten._to_copy" and storage_key(args[0]) in self._parameters:
            name += OF_A_PARAMETER
        node: Any = current_node()  # None outside of a backward pass
        if node is not None and not self._paths.current:
            filename, line, function, module = self._of_node.get(node_number(node), ("", 0, "", ""))
            return Origin(filename, line, function, module, f"{name} ({node.name()})")
        place = (*statement(), self._paths.current)
        if node is None:
            # Autograd has counted the node of this operation already; the first operation that it sees names it.
            self._of_node.setdefault(next_node_number() - 1, place)
        return Origin(*place, name)
