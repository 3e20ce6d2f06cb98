"""Records what a mod computes: torch's operators on tensors without axes that stand for a pair."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ...kernels.torch_names import untransformed
from .graph import Graph, Node, in_order
from .recorder import Recorder, refuse

MOST_IN_A_ROW = 64
"""Elements of a captured tensor that a mod may take without an index: each is read by itself."""
OF_A_FUNCTION = "calls {}, an autograd Function, whose backward kernels do not have"


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
        args = tuple(self._row(value) if id(value) in self._begun else value for value in args)
        return func(*args, **(kwargs or {}))

    def _row(self, begun: Tensor) -> Tensor:
        """A captured tensor whose last axis alone has no index, as all elements along it."""
        rest, tensor, nodes = self._begun[id(begun)]
        if rest.ndim > 1 or not 0 < len(rest) <= MOST_IN_A_ROW:
            raise refuse(
                "uses a captured tensor that has an index for some of its axes only: one may have none, of at most "
                f"{MOST_IN_A_ROW} elements; got {tuple(rest.shape)}"
            )
        graph = self.recorder.graph
        reads = [graph.read(tensor, (*nodes, graph.number(place))) for place in range(len(rest))]
        return self.recorder.stand_in(*reads, shape=(len(rest),))

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
