"""What stands for a pair while a mod is recorded, and what torch's operators make of it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor

from ...kernels.torch_names import RecordingMode
from .graph import SAME, Graph, Node
from .operations import FOLDED, KNOWN, MADE_OF, RESHAPED

_OURS = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_REPLAYED = os.path.join(os.path.dirname(__file__), "replayed.py")


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
        self._known: dict[int, tuple[Tensor, tuple[Node, ...]]] = {}

    def stand_for(self, tensor: Tensor, *nodes: Node) -> Tensor:
        """Let a tensor without axes stand for a node, or one with an axis for a row of them."""
        self._known[id(tensor)] = tensor, nodes  # kept, so that its id stays its own
        return tensor

    def stand_in(self, *nodes: Node, shape: tuple[int, ...] = ()) -> Tensor:
        """A tensor that stands for nodes. Any value would do; integers are not divided by 0."""
        dtype = nodes[0].dtype
        if nodes[0].is_integer:
            return self.stand_for(torch.ones(shape, dtype=dtype, device="cpu"), *nodes)
        leaf = torch.ones(shape, dtype=dtype, device="cpu", requires_grad=True)
        return self.stand_for(leaf, *nodes).clone()  # a leaf could not be changed in place

    def knows(self, value: Any) -> bool:
        """Whether a value is a tensor that stands for nodes."""
        return isinstance(value, Tensor) and id(value) in self._known

    def elements(self, value: Any) -> tuple[Any, ...]:
        """The nodes of a row, or the one of a tensor without axes; what is no tensor, as it is."""
        if self.knows(value):
            return self._known[id(value)][1]
        return (self.node_of(value) if isinstance(value, Tensor) else value,)

    def node_of(self, value: Any) -> Node:
        """The node of a tensor without axes, or of a number: a captured one is a read."""
        if not isinstance(value, Tensor):
            return self.graph.number(value)
        if id(value) in self._known and not value.ndim:
            return self._known[id(value)][1][0]
        if id(value) in self._known:
            raise refuse(f"makes a row of {value.numel()} elements, of which a pair has none")
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
            self.elements(tensor)  # refuses captured ones that have axes
        if name in MADE_OF:
            with self:
                return MADE_OF[name](*args, **keywords)
        result = func(*args, **keywords)
        if not isinstance(result, Tensor) or result.ndim > 1:
            raise refuse(f"uses {name}, which does not make one element")
        if result.ndim or any(tensor.ndim for tensor in tensors):
            return self.stand_for(result, *self._made_of_rows(func, name, result, args, keywords))
        return self.stand_for(result, self._made_by(func, name, result, args, keywords))

    def _made_of_rows(
        self, func: Any, name: str, result: Tensor, args: Any, keywords: dict[str, Any]
    ) -> tuple[Node, ...]:
        """What an operator makes of each element of rows, or of all of them together."""
        nodes = self.elements(args[0])
        if name in RESHAPED:
            return nodes * (result.numel() // len(nodes))
        if name in FOLDED and result.numel() == 1:
            if name == "dot":
                other = self.elements(args[1])
                product = torch.ops.aten.mul.Tensor
                nodes = tuple(
                    self.graph.operation(product, result.dtype, pair, ()) for pair in zip(nodes, other, strict=True)
                )
            if any(node.dtype != result.dtype for node in nodes):
                raise refuse(f"uses {name} on {nodes[0].dtype}, which makes {result.dtype}")
            return (functools.reduce(lambda x, y: self.graph.operation(FOLDED[name], result.dtype, (x, y), ()), nodes),)
        if name not in KNOWN or name in SAME:
            raise refuse(f"uses {name} on a row of a captured tensor")
        return self._of_elements(func, result, args, keywords)

    def _of_elements(self, func: Any, result: Tensor, args: Any, keywords: dict[str, Any]) -> tuple[Node, ...]:
        """The operation for each element of the result; what is no row is the same for all."""
        given, named = [self.elements(x) for x in args], {key: self.elements(x) for key, x in keywords.items()}

        def operation(place: int) -> Node:
            arguments = tuple(x[place % len(x)] for x in given)
            options = tuple((key, x[place % len(x)]) for key, x in named.items())
            return self.graph.operation(func, result.dtype, arguments, options)

        return tuple(map(operation, range(result.numel())))

    def _made_by(self, func: Any, name: str, result: Tensor, args: Any, keywords: dict[str, Any]) -> Node:
        if name in ("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"):
            return self.graph.number(result.item())
        if _is_in_place(name):
            # The tensor stands for the new node from here on.
            name = name.removesuffix("_")
            func = getattr(getattr(torch.ops.aten, name, None), str(func).rpartition(".")[2], func)
        if name not in KNOWN:
            raise refuse(f"uses {name}, which kernels do not have for elements")
        return self._of_elements(func, result, args, keywords)[0]


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
