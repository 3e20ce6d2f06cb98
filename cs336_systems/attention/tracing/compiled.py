"""Records mods where torch.compile traces a call: Dynamo runs their code, and a torch function mode lists what they do.

The pair's score and indices are tensors without axes on the meta device, so what the mode has not seen cannot be taken
for a captured tensor. What a mod computes is then known as constants: torch's functions, numbers, positions and dtypes
of captured tensors. `replayed` makes the rule of these, outside of what is traced. So Dynamo guards on all that a mod
depends on; captured tensors are tensors of the graph, and get their gradients; and no number that differs between calls
is a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...kernels.mods import PLACES, SCORE
from ...kernels.rules import Leaf
from ...kernels.torch_names import constant_of, traced_functions
from .graph import Node
from .record import OF_A_FUNCTION
from .replayed import names_of, rule
from .tables import Table

_READS = (Tensor.__getitem__, operator.getitem)
_MAKERS = (torch.tensor, torch.scalar_tensor, torch.full, torch.zeros, torch.ones)
"""What makes tensors of numbers; one without axes is a number."""


def _refused(what: str) -> ValueError:
    return ValueError(f"a mod must compute one element from one pair, by torch's operators; it {what}")


class _Tape(TorchFunctionMode):
    """What a mod has done so far, and the tensors that it captured.

    Attributes:
        nodes: in the order in which they were made. Their operators are torch's functions or Python's.
        tensors: what was captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self._elements: list[tuple[Tensor, Node]] = []
        self._functions = len(traced_functions())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if func in _READS:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_element(x) for x in (args[0], *indices)):
                return self._read(args[0], indices)
        if func in _MAKERS:
            made = func(*args, **keywords)
            value = 0 if func is torch.zeros else 1 if func is torch.ones else args[-1]
            if made.ndim == 0 and isinstance(value, (int, float)) and constant_of(value) is not None:
                named = (("dtype", made.dtype),)
                return self._stand_in(self._new("operation", torch.tensor, made.dtype, (value,), named))
            return made
        given = (*args, *keywords.values())
        given = (*given, *[item for x in given if isinstance(x, (list, tuple)) for item in x])
        return self._operation(func, args, keywords) if any(map(_is_element, given)) else func(*args, **keywords)

    def place(self, name: str) -> Tensor:
        """What stands for the score or an index of the pair."""
        return self._stand_in(self._new("place", name, torch.float32 if name == SCORE else torch.int32))

    def number(self, value: float) -> Node:
        """The node of a number."""
        return self._new("number", value, torch.float32 if isinstance(value, float) else torch.int64)

    def node_of(self, value: Any) -> Any:
        """The node of an element, a tensor without axes, or a number that differs between calls; others as they are."""
        if _is_element(value):
            for known, node in reversed(self._elements):
                if known is value:
                    if node.kind == "part":
                        raise _refused("uses a row of a captured tensor; make the mask or the score change before")
                    return node
            raise _refused("does what torch.compile does not show; make the mask or the score change before")
        if isinstance(value, (int, float)):
            known = constant_of(value)
            if known is not None:
                return known
            # Of a product torch.compile keeps a float that changes, where other operators have it compiled again.
            one = torch.ones((), dtype=torch.float64)
            value = torch.full((), value) if isinstance(value, int) else one * value
        if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
            raise _refused("puts elements together")
        if not isinstance(value, Tensor):
            return value
        if value.ndim:
            shape = tuple(value.shape)
            raise _refused(f"takes a captured tensor of shape {shape} whole; index it by b, h, q_idx, kv_idx")
        self._position_of(value)
        return self._new("read", value, value.dtype)

    def described(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The nodes and the captured tensors as constants; see `replayed.rule`."""

        def operand(value: Any) -> tuple[str, Any]:
            return ("node", self.nodes.index(value)) if isinstance(value, Node) else ("value", value)

        nodes = []
        for node in self.nodes:
            value = self._position_of(node.value) if node.kind in ("read", "part") else node.value
            arguments = tuple([operand(x) for x in node.arguments])
            nodes.append((node.kind, value, arguments, tuple([(name, operand(x)) for name, x in node.keywords])))
        return tuple(nodes), tuple([(x.ndim, x.dtype, x.requires_grad) for x in self.tensors])

    def to(self, device: torch.device | None) -> None:
        """Bring tensors without axes, as numbers are, to this device, or to that of the others."""
        for tensor in self.tensors:
            device = tensor.device if device is None and tensor.ndim else device
        for node in self.nodes:
            if node.kind == "read" and not node.value.ndim and device is not None:
                position = self._position_of(node.value)
                node.value = self.tensors[position] = node.value.to(device)

    def _read(self, captured: Tensor, indices: tuple[Any, ...]) -> Tensor:
        """An element of a captured tensor, or what has further axes to be indexed."""
        nodes: tuple[Node, ...] = ()
        if _is_element(captured):
            begun = next((node for known, node in self._elements if known is captured), None)
            if begun is None or begun.kind != "part":
                raise _refused("indexes what has no axes")
            captured, nodes = begun.value, begun.arguments
        for index in indices:
            node = self.node_of(index)
            if not isinstance(node, Node):
                if isinstance(node, bool) or not isinstance(node, int):
                    raise _refused(f"indexes by {type(index).__name__}; an index must be an integer for one pair")
                node = self.number(node)
            nodes = (*nodes, node)
        if len(nodes) > captured.ndim:
            raise _refused(f"has more indices than the {captured.ndim} axes of a captured tensor")
        self._position_of(captured)
        kind = "read" if len(nodes) == captured.ndim else "part"
        return self._stand_in(self._new(kind, captured, captured.dtype, nodes), captured.ndim - len(nodes))

    def _operation(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
        """What a function of torch or Python makes of elements and other values."""
        name, out_of_place = names_of(function)
        functions = traced_functions()
        if len(functions) > self._functions:
            raise _refused(OF_A_FUNCTION.format(functions[0]))
        if out_of_place:
            if not _is_element(arguments[0]):
                raise _refused(f"changes a captured tensor by {name}")
            function = getattr(Tensor, out_of_place)
        operands = tuple([self.node_of(x) for x in arguments])
        named = tuple([(key, self.node_of(x)) for key, x in keywords.items()])
        made = function(*map(_as_element, arguments), **{key: _as_element(x) for key, x in keywords.items()})
        if not isinstance(made, Tensor) or made.ndim:
            raise _refused(f"uses {name}, which does not make one element")
        node = self._new("operation", function, made.dtype, operands, named)
        if not out_of_place:
            return self._stand_in(node)
        if made.dtype != arguments[0].dtype:
            raise _refused(f"makes {made.dtype} of {arguments[0].dtype} by {name}")
        self._elements.append((arguments[0], node))  # which it stands for from here on
        changed: Tensor = arguments[0]
        return changed

    def _new(self, kind: str, value: Any, dtype: torch.dtype, arguments: Any = (), keywords: Any = ()) -> Node:
        node = Node(kind, value, dtype, arguments, keywords)
        self.nodes.append(node)
        return node

    def _stand_in(self, node: Node, axes: int = 0) -> Tensor:
        tensor = torch.ones((1,) * axes, dtype=node.dtype, device="meta")
        self._elements.append((tensor, node))
        return tensor

    def _position_of(self, tensor: Tensor) -> int:
        for position, known in enumerate(self.tensors):
            if known is tensor:
                return position
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _is_element(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _as_element(value: Any) -> Any:
    """What has the dtype of a value, and is no use of a captured tensor, nor of a number, of which there may be one."""
    if isinstance(value, Tensor) and not _is_element(value):
        return torch.ones((), dtype=value.dtype, device="meta")
    return 1.0 if isinstance(value, float) else value


def rule_of(mod: Callable[..., Any], kind: str, device: torch.device | None) -> tuple[Leaf, tuple[Tensor | Table, ...]]:
    """What `write` gives of a mod, "mask" or "score", while Dynamo traces.

    Args:
        device: where numbers that differ between calls are to be; that of the captured tensors if None.

    Raises:
        ValueError, TypeError: as `record` and `write`; Dynamo reports them as what it cannot trace.
    """
    tape = _Tape()
    places = [tape.place(name) for name in PLACES[kind]]
    with tape:
        result = mod(*places)
    if not isinstance(result, (Tensor, bool, int, float)):
        raise TypeError(f"a mod must return a tensor; got {type(result).__name__}")
    node = tape.node_of(result)
    if not isinstance(node, Node):
        node = tape.number(node)
    tape.to(device)
    error, name, numbers, slots = rule(kind, *tape.described(), tape.nodes.index(node))
    if error:
        raise ValueError(error)
    captured = tuple([tape.tensors[x[0]].shape[x[1]] if isinstance(x, tuple) else x for x in numbers])
    return (name, captured), tuple([_captured(tape, kind, *slot) for slot in slots])


def _captured(tape: _Tape, kind: str, place: int, axes: Any, order: Any) -> Tensor | Table:
    if axes is not None and order is None:
        return Table(tape.nodes[place], axes)
    tensor = tape.tensors[place]
    if order is None:
        return tensor
    return Table(Node("read", tensor, tensor.dtype), axes, order) if kind == "score" else tensor.permute(order)
