"""Memory over time: when each tensor's storage is allocated and freed, by what, and by category.

A dispatch mode follows the storages of the tensors that operations return, on any device, until they are freed. It does
not see temporaries inside of an operation, rounding and caching; on CUDA `measure_memory` does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .memory import MemoryUsage
from .regions import OPTIMIZER, RegionOf, RegionTracker, Statement, region_of_module, tensors_in
from .torch_names import TorchDispatchMode, current_node, next_node_number, node_number

if TYPE_CHECKING:
    import pandas as pd

TRACKED_TENSORS = "tracked tensors"
PARAMETERS, GRADIENTS, OPTIMIZER_STATE = "parameters", "gradients", "optimizer state"
_COPY = " of a parameter"
UNKNOWN = Statement()


@dataclass
class Allocation:
    """The storage of a tensor.

    Attributes:
        bytes: its size.
        begin, end: the events that allocate and free it; 0 if allocated before the recording, None if never freed.
        phase: in which it is allocated; "" before the first one.
        region, module: the region and the path of the module whose forward allocates it. In the backward they are those
            of the operation whose gradient is computed.
        operation: such as ``aten.bmm``; in the backward with the node: ``aten.bmm (BmmBackward0)``.
        statement: source line that calls the operation; in the backward, the line of the forward operation.
        owner: "parameters", "gradients" or "optimizer state" if the model or the optimizer holds it, else "".
    """

    bytes: int
    begin: int
    end: int | None = None
    phase: str = ""
    region: str = ""
    module: str = ""
    operation: str = ""
    statement: Statement = UNKNOWN
    owner: str = ""

    @property
    def category(self) -> str:
        """The owner, or what else it was allocated for; for activations and their gradients the region."""
        if self.owner or self.begin == 0:
            return self.owner or "other before"
        if self.phase == OPTIMIZER:
            return "optimizer temporaries"
        return "copies of parameters" if self.operation.endswith(_COPY) else self.region or "other"


class MemoryRecorder:
    """Records the allocations inside a ``with`` block.

    >>> with MemoryRecorder(model, device, optimizer) as recorder:
    ...     recorder.phase("forward")
    ...     loss = model(x).sum()
    ...     recorder.phase("backward")
    ...     loss.backward()
    >>> recorder.timeline()  # bytes by category after each event

    Events, which are allocations and frees, are numbered from 1; 0 is the state before. The block must run eagerly,
    since torch.compile does nothing under a dispatch mode, and runs slower than without it.

    Args:
        model, optimizer: whose modules, parameters, gradients and state are distinguished.
        device: whose memory is recorded.
        region_of: gives a module's region from its path and itself; see `region_of_module`.

    Attributes:
        allocations: in their order.
        phases: name and last event before the phase, in order.
        events: how many there are.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        region_of: RegionOf = region_of_module,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._tracker = RegionTracker(model, region_of)
        # By the id of a storage, of which there is one Python object while it lives.
        self._live: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._exit = ExitStack()
        self.allocations: list[Allocation] = []
        self.phases: list[tuple[str, int]] = []
        self.events = 0

    def __enter__(self) -> MemoryRecorder:
        for tensor, _ in self._owned():
            self._follow(tensor)
        self._set_owners()
        self._exit.enter_context(self._tracker)
        parameters = {_storage_id(each) for each in self._model.parameters()}
        self._exit.enter_context(_Tracking(self._follow, self._tracker, parameters))
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()
        self._set_owners()
        self._live.clear()  # drops the weak references, so that later frees are not recorded

    def phase(self, name: str) -> None:
        """Begin a phase: what is allocated from now on belongs to it."""
        self._set_owners()
        self.phases.append((name, self.events))

    def timeline(self) -> pd.DataFrame:
        """Bytes by category (columns, in the order of their first allocation) after each event (rows, from 0)."""
        import numpy as np
        import pandas as pd

        changes: dict[str, Any] = {}
        for each in self.allocations:
            change = changes.setdefault(each.category, np.zeros(self.events + 1, dtype=np.int64))
            change[each.begin] += each.bytes
            if each.end is not None:
                change[each.end] -= each.bytes
        return pd.DataFrame(changes, index=range(self.events + 1)).cumsum()

    def table(self) -> pd.DataFrame:
        """The allocations: columns are the attributes of `Allocation`, and its category."""
        import pandas as pd

        rows = [vars(each) | {"statement": str(each.statement), "category": each.category} for each in self.allocations]
        return pd.DataFrame(rows)

    def usage(self) -> MemoryUsage:
        """Memory of the last step, which begins with the last phase "forward"; held if "backward" follows.

        Raises ValueError if no phase is named "forward".
        """
        names = [name for name, _ in self.phases]
        if "forward" not in names:
            raise ValueError(f"phases must include 'forward'; got {names}")
        first = len(names) - 1 - names[::-1].index("forward")
        begin, end = [*(event for _, event in self.phases), self.events][first : first + 2]
        total = self.timeline().sum(axis="columns")
        before = int(total[begin])
        held = int(total[end]) - before if "backward" in names[first:] else None
        return MemoryUsage(before, held, int(total[begin:].max()) - before, None, TRACKED_TENSORS)

    def snapshot(self) -> dict[str, Any]:
        """The allocations in the form of `torch.cuda.memory._snapshot`, with categories, and numbers for addresses.

        Pickled, https://docs.pytorch.org/memory_viz shows it, and ``python -m torch.cuda._memory_viz`` reads it.
        """
        entries = []
        for number, each in enumerate(self.allocations):
            operation = {"filename": each.module, "line": 0, "name": each.operation}
            caller = {"filename": each.statement.filename, "line": each.statement.line, "name": each.statement.function}
            entry = {"addr": number, "size": each.bytes, "stream": 0, "frames": [operation, caller]}
            entries.append((each.begin, entry | {"action": "alloc", "category": each.category}))
            if each.end is not None:
                entries += [(each.end, entry | {"action": f"free_{step}"}) for step in ("requested", "completed")]
        trace = [entry for _, entry in sorted(entries, key=lambda item: item[0])]
        return {"segments": [], "device_traces": [trace], "allocator_settings": {}}

    def _follow(self, tensor: Tensor, *origin: Any) -> None:
        """Follow a storage that is not known yet. Without an origin it was allocated before the recording."""
        if tensor.device.type != self._device.type or type(tensor) not in (Tensor, nn.Parameter):
            return
        storage, key = tensor.untyped_storage(), _storage_id(tensor)
        if key in self._live or storage.nbytes() == 0:
            return
        begin, phase = 0, ""
        if origin:
            begin = self.events = self.events + 1
            phase = self.phases[-1][0] if self.phases else ""
        allocation = Allocation(storage.nbytes(), begin, None, phase, *origin)
        self.allocations.append(allocation)
        self._live[key] = weakref.ref(storage, functools.partial(self._freed, key)), allocation

    def _freed(self, key: int, reference: object) -> None:
        self.events += 1
        self._live.pop(key)[1].end = self.events

    def _owned(self) -> Iterator[tuple[Tensor, str]]:
        parameters = [*self._model.parameters()]
        yield from ((tensor, PARAMETERS) for tensor in (*parameters, *self._model.buffers()))
        yield from ((each.grad, GRADIENTS) for each in parameters if each.grad is not None)
        states = [] if self._optimizer is None else self._optimizer.state.values()
        yield from ((each, OPTIMIZER_STATE) for state in states for each in state.values() if isinstance(each, Tensor))

    def _set_owners(self) -> None:
        for tensor, owner in self._owned():
            if _storage_id(tensor) in self._live:
                self._live[_storage_id(tensor)][1].owner = owner


def _storage_id(tensor: Tensor) -> int:
    """Equal for all tensors of one storage, and for no others while it lives."""
    return id(tensor.untyped_storage())


class _Tracking(TorchDispatchMode):
    """Calls ``follow`` with the inputs of every operation, and with its results and their origin."""

    def __init__(self, follow: Any, tracker: RegionTracker, parameters: set[int]) -> None:
        super().__init__()
        self._follow, self._tracker, self._parameters = follow, tracker, parameters
        self._of_node: dict[int, tuple[str, str, Statement]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(operation.overloadpacket)
        if name == "aten._to_copy" and _storage_id(args[0]) in self._parameters:
            name += _COPY
        node = current_node()  # None outside of a backward pass
        region, module, statement = *self._tracker.current, Statement.innermost()
        if node is None:
            # Autograd has numbered this operation's node already. The first operation of a node names it.
            self._of_node.setdefault(next_node_number() - 1, (region, module, statement))
        elif not region:
            region, module, statement = self._of_node.get(node_number(node), ("", "", statement))
            name += f" ({node.name()})"
        for tensor in tensors_in((args, kwargs)):
            self._follow(tensor)
        result = operation(*args, **kwargs)
        for tensor in tensors_in(result):
            self._follow(tensor, region, module, name, statement)
        return result
