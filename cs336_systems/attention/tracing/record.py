"""Records what a mod computes: torch's operators on tensors without axes that stand for a pair."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ...kernels.torch_names import RecordingMode, untransformed
from .graph import Graph, Node, in_order
from .operations import KNOWN, MADE_OF

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_REPLAYED = os.path.join(os.path.dirname(__file__), "replayed.py")


OF_A_FUNCTION = "calls {}, an autograd Function, whose backward kernels do not have"


def refuse(what: str) -> ValueError:
    """The exception for a mod that does this, with the line that does it.

    No TypeError: of an operator such as + Python would hide it.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        # Within torch.compile the mod's line has run before: Dynamo says which one that was.
        frame = None if frame.f_code.co_filename == _REPLAYED else frame.f_back  # type: ignore[assignment]
    where = "" if frame is None else f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
    return ValueError(f"a mod must compute one element from one pair, by torch's operators; it {what}{where}")


class Recorder(RecordingMode):
    """Knows the nodes of tensors; what an operator makes of such tensors is a new node.

    What is computed from captured tensors alone is computed, and its results are captured.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self._known: dict[int, tuple[Tensor, Node]] = {}

    def stand_for(self, tensor: Tensor, node: Node) -> Tensor:
        """Let a tensor without axes stand for a node."""
        self._known[id(tensor)] = tensor, node  # kept, so that its id stays its own
        return tensor

    def stand_in(self, node: Node) -> Tensor:
        """A tensor that stands for a node. Any value would do; integers are not divided by 0."""
        if node.is_integer:
            return self.stand_for(torch.ones((), dtype=node.dtype, device="cpu"), node)
        leaf = torch.ones((), dtype=node.dtype, device="cpu", requires_grad=True)
        return self.stand_for(leaf, node).clone()  # a leaf could not be changed in place

    def knows(self, value: Any) -> bool:
        """Whether a value is a tensor that stands for a node."""
        return isinstance(value, Tensor) and id(value) in self._known

    def node_of(self, value: Any) -> Node:
        """The node of a tensor without axes, or of a number: a captured one is a read."""
        if not isinstance(value, Tensor):
            return self.graph.number(value)
        if id(value) in self._known:
            return self._known[id(value)][1]
        if value.ndim:
            raise refuse(
                f"takes a captured tensor of shape {tuple(value.shape)} whole; index it by b, h, q_idx, kv_idx"
            )
        if value.device.type == "cpu" and not value.requires_grad:
            self.graph.computes = True
            return self.graph.number(value.item())
        return self.graph.read(value, ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        given = [*args, *keywords.values()]
        given += [item for value in given if isinstance(value, (list, tuple)) for item in value]
        tensors = [value for value in given if isinstance(value, Tensor)]
        name = func.overloadpacket.__name__
        if not any(map(self.knows, tensors)):
            result = func(*args, **keywords)
            if (not tensors or name == "lift_fresh") and isinstance(result, Tensor) and result.ndim == 0:
                self.stand_for(result, self.graph.number(result.item()))
            else:
                self.graph.computes = True
            return result
        if name in ("_local_scalar_dense", "is_nonzero", "equal"):
            raise refuse("branches on a value, or takes it out of its tensor; use torch.where")
        if func.namespace not in ("aten", "prims"):
            raise refuse(f"uses {name} of {func.namespace}, and kernels know torch's operators alone")
        if _is_in_place(name) and not self.knows(args[0]):
            raise refuse(f"changes a captured tensor by {name}")
        for tensor in tensors:
            self.node_of(tensor)  # refuses those that have axes
        if name in MADE_OF:
            with self:
                return MADE_OF[name](*args, **keywords)
        result = func(*args, **keywords)
        if not isinstance(result, Tensor) or result.ndim:
            raise refuse(f"uses {name}, which does not make one element")
        self.stand_for(result, self._made_by(func, name, result, args, keywords))
        return result

    def _made_by(self, func: Any, name: str, result: Tensor, args: Any, keywords: dict[str, Any]) -> Node:
        if name in ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"):
            return self.graph.number(result.item())
        if _is_in_place(name):
            # The tensor stands for the new node from here on.
            name = name.removesuffix("_")
            func = getattr(getattr(torch.ops.aten, name, None), str(func).rpartition(".")[2], func)
        if name not in KNOWN:
            raise refuse(f"uses {name}, which kernels do not have for elements")
        nodes = tuple(self.node_of(value) if isinstance(value, Tensor) else value for value in args)
        named = tuple((key, self.node_of(x) if isinstance(x, Tensor) else x) for key, x in keywords.items())
        return self.graph.operation(func, result.dtype, nodes, named)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


class IndexedByPairs(TorchFunctionMode):
    """``x[b, q_idx]`` asks a tensor without axes for its value; here it is a read."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._begun: dict[int, tuple[Tensor, Tensor, tuple[Node, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(self.recorder.knows, indices)) or id(args[0]) in self._begun:
                return self.read(args[0], indices)
        elif any(id(value) in self._begun for value in args):
            raise refuse("uses a captured tensor that has an index for some of its axes only")
        return func(*args, **(kwargs or {}))

    def read(self, tensor: Any, indices: tuple[Any, ...]) -> Tensor:
        """An element of a captured tensor, or what stands for it until its other axes have an index."""
        recorder = self.recorder
        if recorder.knows(tensor):
            raise refuse("indexes what has no axes")
        nodes: tuple[Node, ...] = ()
        if id(tensor) in self._begun:
            _, tensor, nodes = self._begun[id(tensor)]
        for index in indices:
            if len(nodes) >= tensor.ndim:
                raise refuse(f"has more indices than the {tensor.ndim} axes of a captured tensor")
            if isinstance(index, int) and not isinstance(index, bool):
                nodes += (recorder.graph.number(index),)
            elif isinstance(index, Tensor) and index.ndim == 0 and not index.is_floating_point():
                nodes += (recorder.node_of(index),)
            else:
                raise refuse(f"indexes by {type(index).__name__}; an index must be an integer for one pair")
        if len(nodes) == tensor.ndim:
            return recorder.stand_in(recorder.graph.read(tensor, nodes))
        rest = torch.zeros(tensor.shape[len(nodes) :], dtype=tensor.dtype, device="meta")
        self._begun[id(rest)] = rest, tensor, nodes
        return rest


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Where neither inference mode nor a transform of torch.func changes what operators are, or get."""
    with torch.inference_mode(False), torch.enable_grad(), untransformed():
        yield


def record(mod: Callable[..., Any], places: tuple[str, ...]) -> tuple[Graph, Node]:
    """What a mod computes of these places. Raises ValueError for what cannot be traced, and names the line."""
    return record_by(lambda indexed, arguments: mod(*arguments), places)


def record_by(run: Callable[[IndexedByPairs, list[Tensor]], Any], places: tuple[str, ...]) -> tuple[Graph, Node]:
    """Record what a function computes of tensors without axes that stand for the places; raises as `record` does."""
    graph = Graph()
    recorder = Recorder(graph)
    # With gradients, so that autograd's graph shows Functions.
    with _plainly(), IndexedByPairs(recorder) as indexed, recorder:
        result = run(indexed, [recorder.stand_in(graph.place(name)) for name in places])
        if not isinstance(result, (Tensor, bool, int, float)):
            raise TypeError(f"a mod must return a tensor; got {type(result).__name__}")
        for function in _users_first(getattr(result, "grad_fn", None)):
            if isinstance(function, BackwardCFunction):
                raise refuse(OF_A_FUNCTION.format(type(function).__name__.removesuffix("Backward")))
        return graph, recorder.node_of(result)


def slopes(graph: Graph, result: Node, by: tuple[Node, ...]) -> list[Node | None]:
    """The derivatives of a result by these nodes; None for a node that does not change it.

    autograd finds them, and is recorded as it does.
    """
    recorder, values = Recorder(graph), dict[Node, Any]()
    with _plainly(), recorder:
        for node in in_order(result):
            if node.kind == "number":
                values[node] = recorder.stand_for(torch.tensor(node.value, dtype=node.dtype, device="cpu"), node)
            elif node.kind == "operation":
                arguments, named = node.operands(values)
                values[node] = node.value(*arguments, **named)
            else:
                leaf = torch.ones((), dtype=node.dtype, device="cpu", requires_grad=node in by)
                values[node] = recorder.stand_for(leaf, node)
        if not values[result].requires_grad:
            return [None] * len(by)
        found = _gradients(values[result])
        known = {node: found.get(values[node]) for node in by if node in values}
        return [None if (slope := known.get(node)) is None else recorder.node_of(slope) for node in by]


@torch.no_grad()
def _gradients(result: Tensor) -> dict[Tensor, Tensor]:
    """The gradients of a number by its leaves, as autograd's own functions compute them, one after another.

    Not by autograd's engine: that asks CUDA for its devices, after which no process that is forked can use them.
    """
    one = torch.ones_like(result)
    if result.grad_fn is None:
        return {result: one}
    pending: dict[Any, list[Tensor | None]] = {result.grad_fn: [one]}
    for function in _users_first(result.grad_fn):
        if function not in pending:  # what leads to it has no derivative
            continue
        gradients = function(*pending.pop(function))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for (target, place), gradient in zip(function.next_functions, gradients, strict=True):
            if target is None or gradient is None:
                continue
            slots = pending.setdefault(target, [])
            slots += [None] * (place + 1 - len(slots))
            slots[place] = gradient if slots[place] is None else slots[place] + gradient
    # The functions have been taken out; what is left accumulates the gradients of leaves.
    return {target.variable: gradient for target, [gradient] in pending.items() if gradient is not None}


def _users_first(function: Any) -> list[Any]:
    """A function of autograd's graph and those that it leads to, each after all that lead to it; without leaves."""
    order, seen, waiting = list[Any](), set[Any](), [(function, False)] if function is not None else []
    while waiting:
        function, is_done = waiting.pop()
        if is_done:
            order.append(function)
        elif function not in seen:
            seen.add(function)
            waiting.append((function, True))
            waiting += [(x, False) for x, _ in function.next_functions if x is not None and not hasattr(x, "variable")]
    return order[::-1]
