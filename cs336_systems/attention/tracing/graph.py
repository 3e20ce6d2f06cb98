"""What a mod computes, as an expression of the pair's score and indices, numbers, and elements of captured tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.mods import AXES, DISTANCE, SCORE


class Node:
    """One value of the expression, compared by identity: `Graph` makes each but once.

    Attributes:
        kind: "place", "number", "read" or "operation".
        value: the name of a place, `SCORE` or of `AXES`; a number; the captured tensor; or the operator of torch.
        arguments: of a read, a node for each axis; of an operation, nodes and other values, as torch got them.
        dtype: of the value.
    """

    __slots__ = ("arguments", "dtype", "keywords", "kind", "value")

    def __init__(
        self, kind: str, value: Any, dtype: torch.dtype, arguments: tuple[Any, ...] = (), keywords: Any = ()
    ) -> None:
        self.kind, self.value, self.dtype = kind, value, dtype
        self.arguments, self.keywords = arguments, keywords

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes among the arguments."""
        values = [*self.arguments, *(value for _, value in self.keywords)]
        return tuple(value for value in values if isinstance(value, Node))

    def operands(self, values: Mapping[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments, with these values in place of nodes."""
        arguments = tuple(values[x] if isinstance(x, Node) else x for x in self.arguments)
        return arguments, {key: values[x] if isinstance(x, Node) else x for key, x in self.keywords}

    @property
    def name(self) -> str:
        """Of an operation: torch's name without namespace and overload."""
        return str(self.value.overloadpacket.__name__)

    @property
    def is_integer(self) -> bool:
        """Whether the value is an integer or a bool."""
        return not self.dtype.is_floating_point


class Graph:
    """The nodes of a mod. Equal operations on equal nodes are one node.

    Attributes:
        computes: whether what it reads has been computed from captured tensors, whose later elements it does not see.
    """

    def __init__(self) -> None:
        self.computes = False
        self._nodes: dict[Any, Node] = {}

    def place(self, name: str) -> Node:
        """The score, or an index of the pair."""
        return self._only(("place", name), "place", name, torch.float32 if name == SCORE else torch.int32)

    def number(self, value: float) -> Node:
        """A constant."""
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
        return self._only(("number", type(value), repr(value)), "number", value, dtype)

    def read(self, tensor: Tensor, indices: tuple[Node, ...]) -> Node:
        """An element of a captured tensor."""
        return self._only(("read", id(tensor), *map(id, indices)), "read", tensor, tensor.dtype, indices)

    def operation(self, operator: Any, dtype: torch.dtype, arguments: tuple[Any, ...], keywords: Any) -> Node:
        """What an operator makes of nodes and other values."""
        parts = [id(x) if isinstance(x, Node) else repr(x) for x in (*arguments, *keywords)]
        node = Node("operation", operator, dtype, arguments, keywords)
        return self._nodes.setdefault(("operation", operator, dtype, *parts), self._simplified(node))

    def _simplified(self, node: Node) -> Node:
        """What an operation gives that changes nothing, as many in derivatives do; or the node."""
        if node.name in SAME and (node.inputs[0].dtype == node.dtype or not node.inputs[0].is_integer):
            return node.inputs[0]  # all floating-point numbers have one dtype
        if node.name == "_to_copy" and not node.is_integer and not node.inputs[0].is_integer:
            return node.inputs[0]
        if node.name == "mul":
            one, other = node.arguments
            for factor, value in ((one, other), (other, one)):
                if isinstance(factor, Node) and factor.kind == "number" and factor.value == 1:
                    value = value if isinstance(value, Node) else self.number(float(value))
                    return value if value.dtype == node.dtype else node
        return node

    def _only(self, key: Any, kind: str, value: Any, dtype: torch.dtype, arguments: tuple[Any, ...] = ()) -> Node:
        return self._nodes.setdefault(key, Node(kind, value, dtype, arguments))


SAME = frozenset(
    (
        *("alias", "clone", "contiguous", "detach", "expand", "expand_as", "lift_fresh", "lift_fresh_copy", "reshape"),
        *("squeeze", "sum", "sum_to_size", "_unsafe_view", "view", "view_as"),
    )
)
"""Operators that change no element without axes."""


def in_order(result: Node, without: Collection[Node] = ()) -> list[Node]:
    """The nodes that a result is made of, each after its inputs; not the inputs of those in ``without``."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in order:
            for each in node.inputs if node not in without else ():
                visit(each)
            order[node] = None

    visit(result)
    return list(order)


class Index(NamedTuple):
    """An index that depends linearly on the pair: the sum of places times their factors, plus a number."""

    factors: dict[str, int]
    number: int

    @property
    def axis(self) -> tuple[str, int, bool] | None:
        """The axis that a tensor has which is read so, among `AXES` and `DISTANCE`; its origin; and whether it runs
        backwards, from the last distance to the first. None for another index.
        """
        factors = {name: factor for name, factor in self.factors.items() if factor}
        if len(factors) == 1 and self.number == 0 and [*factors.values()] == [1]:
            return next(iter(factors)), 0, False
        if factors == {"row": -1, "column": 1} or factors == {"row": 1, "column": -1}:
            return DISTANCE, self.number, factors["row"] == 1
        return None


_LINEAR: dict[str, Callable[[int, int], int]] = {"add": operator.add, "sub": operator.sub}


def linear(node: Node) -> Index | None:
    """An index as a linear function of the pair; None if it is not one, or reads a tensor."""
    if node.kind == "number" and isinstance(node.value, int) and not isinstance(node.value, bool):
        return Index({}, node.value)
    if node.kind == "place" and node.value in AXES:
        return Index({node.value: 1}, 0)
    if node.kind != "operation" or node.keywords or not node.is_integer:
        return None
    parts = [linear(each) if isinstance(each, Node) else Index({}, each) for each in _operands(node)]
    if node.name in _LINEAR and len(parts) == 2 and None not in parts:
        combine = _LINEAR[node.name]
        one, other = (part for part in parts if part is not None)
        factors = {name: combine(one.factors.get(name, 0), other.factors.get(name, 0)) for name in AXES}
        return Index(factors, combine(one.number, other.number))
    if node.name == "neg" and parts[0] is not None:
        return Index({name: -factor for name, factor in parts[0].factors.items()}, -parts[0].number)
    return parts[0] if node.name == "_to_copy" else None


def _operands(node: Node) -> Iterator[Any]:
    return iter([value for value in node.arguments if isinstance(value, (Node, int))])
