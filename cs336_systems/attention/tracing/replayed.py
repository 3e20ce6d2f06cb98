"""Rules of what `compiled` has listed, made outside of what torch.compile traces: constants come in, and go out."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from ...kernels.mods import PLACES
from ...kernels.torch_names import constant_when_traced
from .graph import Node
from .record import IndexedByPairs, record_by
from .source import write
from .tables import Table


class _Size(int):
    """The size of an axis of a captured tensor, which may differ between calls. Its value stands for no number."""

    place: tuple[int, int]


class _StandIn:
    """A captured tensor, of which the recorder and the rule see this much."""

    def __init__(self, position: int, ndim: int, dtype: torch.dtype, requires_grad: bool) -> None:
        self.position, self.ndim, self.dtype, self.requires_grad = position, ndim, dtype, requires_grad
        self.order: tuple[int, ...] | None = None
        self.shape = tuple([_Size(10 * position + axis + 10) for axis in range(ndim)])
        for axis, size in enumerate(self.shape):
            size.place = position, axis

    def permute(self, order: list[int]) -> _StandIn:
        """With its axes in another order."""
        turned = _StandIn(self.position, self.ndim, self.dtype, self.requires_grad)
        turned.order = tuple(order)
        return turned


def _replayed(
    indexed: IndexedByPairs, places: list[Tensor], nodes: tuple[Any, ...], tensors: tuple[Any, ...]
) -> list[Any]:
    """The value of each node, on tensors that the recorder knows."""
    stand_ins = [_StandIn(position, *tensor) for position, tensor in enumerate(tensors)]
    values: list[Any] = []
    rest = iter(places)

    def operand(of: tuple[str, Any]) -> Any:
        return values[of[1]] if of[0] == "node" else of[1]

    for kind, value, arguments, keywords in nodes:
        given = tuple([operand(x) for x in arguments])
        if kind == "place":
            values.append(next(rest))
        elif kind == "number":
            values.append(value)
        elif kind == "part":
            values.append(None)
        elif kind == "read":
            values.append(indexed.read(stand_ins[value], given))
        else:
            values.append(value(*given, **{name: operand(x) for name, x in keywords}))
    return values


@constant_when_traced
def names_of(function: Any) -> tuple[str, str]:
    """A function's name, and that of the same method which changes nothing in place, or ""."""
    name: str = function.__name__
    method = f"__{name.removeprefix('i')}__" if getattr(operator, name, None) is function else f"__{name[3:]}"
    if name.startswith(("i", "__i")) and hasattr(Tensor, method):
        return name, method
    in_place = name.endswith("_") and not name.endswith("__") and getattr(operator, name, None) is not function
    return name, name[:-1] if in_place else ""


@constant_when_traced
def rule(kind: str, nodes: tuple[Any, ...], tensors: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    """The rule of a node.

    Returns:
        The message of the error that prevents a rule, or "". The rule's name. What it captured: None for a tensor, the
        position and axis of a size. For each tensor its position, or that of a node to be gathered; its axes; their
        order.
    """
    node_of: dict[Node, int] = {}

    def run(indexed: IndexedByPairs, places: list[Tensor]) -> Any:
        values = _replayed(indexed, places, nodes, tensors)
        for position, (what, *_) in enumerate(nodes):
            if what == "read":
                node_of.setdefault(indexed.recorder.node_of(values[position]), position)
        return values[place]

    try:
        graph, result = record_by(run, PLACES[kind])
        (name, captured), found = write(kind, graph, result)
    except (TypeError, ValueError) as error:
        return str(error), "", (), ()
    slots: list[tuple[Any, ...]] = []
    for each in found:
        if not isinstance(each, Table):
            slots.append((each.position, None, each.order))  # type: ignore[attr-defined]
        elif each.order is None:
            slots.append((node_of[each.read], each.axes, None))
        else:
            slots.append((each.read.value.position, each.axes, each.order))
    numbers = tuple([x.place if isinstance(x, _Size) else x for x in captured])
    return "", name, numbers, tuple(slots)
