"""Tensors that are made of captured ones for each call, and have axes: tables.

``weights[h, buckets[kv_idx - q_idx + n]]`` is a table (heads, distances). torch gathers it before the call, so autograd
brings the table's gradient, which every implementation computes, to ``weights``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.mods import AXES, DISTANCE
from ...kernels.torch_names import transform_level
from ..sizes import Sizes
from .graph import Node, in_order, linear

ROW, COLUMN = AXES[2:]


class Table(NamedTuple):
    """A read, and the axes of its elements: of `AXES`, or `DISTANCE` in place of the last two.

    ``order`` is that of the captured tensor's axes if it has these in another order; None if elements are gathered.
    """

    read: Node
    axes: tuple[str, ...]
    order: tuple[int, ...] | None = None

    def replaced(self, change: Callable[[Any], Any]) -> Table:
        """This table with another tensor in place of each captured one: what ``change`` makes of it."""
        nodes: dict[Node, Node] = {}
        for node in in_order(self.read):
            value = change(node.value) if node.kind == "read" else node.value
            arguments, named = node.operands(nodes)
            nodes[node] = Node(node.kind, value, node.dtype, arguments, tuple(named.items()))
        return self._replace(read=nodes[self.read])

    @property
    def captured(self) -> tuple[Tensor, ...]:
        """The tensors that it is made of."""
        return tuple(node.value for node in in_order(self.read) if node.kind == "read")

    @property
    def is_worthwhile(self) -> bool:
        """Whether to make it: it has no element for each pair, or may need a gradient."""
        needed = transform_level() is not None or any(tensor.requires_grad for tensor in self.captured)
        return needed or not {ROW, COLUMN} <= {*self.axes}

    def of(self, sizes: Sizes) -> Tensor:
        """The table of a call of these sizes; gathered distances are those from 1 - q_len to k_len - 1.

        Raises:
            ValueError: it has rows or columns, and packed sequences come without their bounds.
        """
        if self.order is not None:
            permuted: Tensor = self.read.value.permute(self.order)
            return permuted
        if sizes.note and {*self.axes} & {ROW, COLUMN, DISTANCE}:
            raise ValueError("max_seqlen_q and max_seqlen_k must be given for what scores captured; got None")
        device = self.read.value.device
        ends = {
            "batch": (0, math.prod(sizes.batch)),
            "head": (0, sizes.num_heads),
            ROW: (0, sizes.q_len),
            COLUMN: (0, sizes.k_len),
            DISTANCE: (1 - sizes.q_len, sizes.k_len),
        }
        shape = [ends[axis][1] - ends[axis][0] for axis in self.axes]
        # A distance is that of column `distance` from row 0.
        values: dict[Node, Tensor] = {}
        for node in in_order(self.read):
            if node.kind == "place":
                axis = DISTANCE if node.value == COLUMN and DISTANCE in self.axes else node.value
                values[node] = torch.zeros((), dtype=torch.int64, device=device)
                if axis in self.axes:
                    place = self.axes.index(axis)
                    along = torch.arange(*ends[axis], device=device)
                    values[node] = along.view([-1 if other == place else 1 for other in range(len(shape))])
            elif node.kind == "number":
                values[node] = torch.tensor(node.value, device="cpu")
            elif node.kind == "read":
                places = zip(node.arguments, node.value.shape, strict=True)
                values[node] = node.value[tuple(_inside(values[index], size) for index, size in places)]
            else:
                arguments, named = node.operands(values)
                values[node] = node.value(*arguments, **named)
        return values[self.read].expand(shape)


def _inside(index: Tensor, size: int) -> Tensor:
    """As `kernels.language.inside`: hidden pairs too have an element, and a negative index counts from the end."""
    return torch.where(index < 0, index + size, index).clamp(0, size - 1)


def table_of(read: Node) -> Table:
    """The table of a read, with the fewest axes that its indices differ along."""
    places = {node.value for node in in_order(read) if node.kind == "place"}
    if {ROW, COLUMN} <= places and all(map(_of_distance, read.inputs)):
        places = places - {ROW, COLUMN} | {DISTANCE}
    return Table(read, tuple(axis for axis in (*AXES, DISTANCE) if axis in places))


def _of_distance(node: Node) -> bool:
    """Whether a value depends on row and column by their distance alone."""
    index = linear(node)
    if index is not None:
        return index.factors.get(ROW, 0) == -index.factors.get(COLUMN, 0)
    return node.kind != "place" and all(map(_of_distance, node.inputs))
