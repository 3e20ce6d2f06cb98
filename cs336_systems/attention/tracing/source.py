"""From what a mod computes to a rule: source text that says all of it, and the tensors and numbers that it reads."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...kernels.mods import AXES, DISTANCE, PLACES, SCORE, GradientSource, ModSource
from ...kernels.rules import Leaf
from .graph import Graph, Node, in_order, linear
from .operations import COMPARISONS, TEMPLATES, expression
from .positions import compared_positions
from .record import slopes
from .tables import Table, table_of

UNSIZED = -1
"""The origin of a table of distances, which has the sizes of a call."""
UNBOUNDED = 2.0**10
"""What is taken for the largest derivative of a score change whose derivative has no bound that can be seen."""
_LITERALS = (0, 1, -1, 2, math.inf, -math.inf)


class _Slot:
    """A captured tensor as a rule reads it.

    Attributes:
        tensor: with its axes in the order of `AXES`, the distance last and ascending; or what gives such a tensor.
        indices: the nodes of the indices.
        axes: their names, None where an index is none.
        origin: the index of distance 0; `UNSIZED` where it follows from the sizes of a call.
    """

    def __init__(self, read: Node, *, of_scores: bool) -> None:
        self.tensor: Tensor | Table = read.value
        self.indices: tuple[Node, ...] = read.arguments
        self.axes: tuple[str, ...] | None = None
        self.origin: int | None = None
        found = [index and index.axis for index in map(linear, self.indices)]
        axes = [axis for axis in found if axis is not None]
        names = [name for name, _, _ in axes]
        by_distance = {*names} & {DISTANCE} and {*names} & {*AXES[2:]}
        backwards = any(turned for _, _, turned in axes)
        if len(names) < len(found) or len({*names}) < len(names) or by_distance or backwards:
            table = table_of(read)
            if of_scores and not read.is_integer and table.is_worthwhile:
                self.tensor, self.axes = table, table.axes
                self.origin = UNSIZED if DISTANCE in table.axes else None
            return
        order = sorted(range(len(names)), key=lambda number: (*AXES, DISTANCE).index(names[number]))
        self.axes = tuple(names[number] for number in order)
        self.origin = next((origin for name, origin, _ in axes if name == DISTANCE), None)
        if order != sorted(order):
            # At the call, because a view that is made without gradients has none later.
            self.tensor = Table(read, self.axes, tuple(order)) if of_scores else read.value.permute(order)


class _Writer:
    """Functions of the same arguments: the pair, the captured tensors, and the numbers."""

    def __init__(self, kind: str, slots: dict[Node, _Slot]) -> None:
        self.places, self.slots = PLACES[kind], slots
        self.numbers: list[float] = []
        self.number_of = {read: place for place, read in enumerate(slots)}

    def number(self, value: float, as_float: bool = False) -> str:
        """A number: written out if it is a usual one, so that others compile nothing anew."""
        value = float(value) if as_float or (isinstance(value, float) and not math.isinf(value)) else value
        if isinstance(value, bool) or value in _LITERALS or math.isnan(value):
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        kinds = [(type(known), known) for known in self.numbers]
        if (type(value), value) not in kinds:
            self.numbers.append(value)
            kinds.append((type(value), value))
        return f"n{kinds.index((type(value), value))}"

    def body(self, result: Node) -> tuple[str, ...]:
        """The lines of a function that returns a node."""
        lines, names = list[str](), dict[Node, str]()

        def name(value: object, as_float: bool) -> str:
            if not isinstance(value, Node):
                assert isinstance(value, (int, float))
                return self.number(value, as_float)
            if value.kind == "number":
                return self.number(value.value, as_float)
            if not (as_float and value.is_integer):
                return names[value]
            whole, parts = f"{names[value]}.to(tl.float32)", _in_parts(value, names)
            return whole if parts == whole or parts is None else f"as_float({whole}, {parts})"

        def compared(value: object, as_float: bool) -> str:
            text = name(value, as_float)
            if isinstance(value, Node) and value.kind != "number" and value.is_integer and not as_float:
                return f"compared({text})"
            return text

        read_by_places = [read for read, slot in self.slots.items() if slot.axes is not None]
        texts = {node: compared_positions(node, self.number) for node in in_order(result, read_by_places)}
        of_positions = {node: text for node, text in texts.items() if text is not None}
        for node in in_order(result, [*read_by_places, *of_positions]):
            if node.kind == "place":
                names[node] = node.value
            elif node.kind == "read":
                names[node] = f"v{len(lines)}"
                lines.append(f"{names[node]} = {self._read(node, names)}")
            elif node.kind == "operation":
                text = of_positions.get(node) or expression(node, compared if node.name in COMPARISONS else name)
                names[node] = f"v{len(lines)}"
                lines.append(f"{names[node]} = {text}")
        return (*lines, f"return {name(result, self.places[0] == SCORE)}")

    def _read(self, read: Node, names: dict[Node, str]) -> str:
        slot, number = self.slots[read], self.number_of[read]
        if slot.axes is not None:
            texts = list(slot.axes)
            if slot.origin is not None:
                texts[-1] = f"apart(column, row, {self.origin(slot)})"
        else:
            assert not isinstance(slot.tensor, Table)  # it has axes
            texts = []
            for axis, index in enumerate(slot.indices):
                own = names[index] if index in names else self.number(index.value, False)
                texts.append(f"inside({own}, {self.number(slot.tensor.shape[axis], False)})")
        element = f"at(c{number}, ({''.join(f'{text}, ' for text in texts)}))"
        return f"({element} != 0)" if read.dtype is torch.bool else element

    def origin(self, slot: _Slot) -> str:
        """The name of the number that is a slot's origin: never written out, because calls are checked by it."""
        assert slot.origin is not None
        return f"o{[*self.slots.values()].index(slot)}"


def _in_parts(node: Node, names: dict[Node, str]) -> str | None:
    """A small integer as a float32 expression of what depends on no pair; None where it has none, or may be large.

    Sums of up to four positions up to `NEAR` and numbers are at most 2**24, and so are exact.
    """
    if _terms(node) > 4:
        return None
    if not {*AXES[2:]} <= {*places_of(node)}:
        return None if node.kind == "number" else f"{names[node]}.to(tl.float32)"
    operands = [_in_parts(x, names) if isinstance(x, Node) else None for x in node.arguments]
    if node.name == "sub" and operands == [f"{names.get(x)}.to(tl.float32)" for x in node.arguments]:
        return f"difference({', '.join(names[x] for x in node.arguments)})"
    return None if None in operands else TEMPLATES[node.name].format(*operands)


def _terms(value: object) -> float:
    """How many positions, and numbers that are small, an integer is a sum of; infinity if it is of anything else."""
    if not isinstance(value, Node):
        return 1 if isinstance(value, int) and abs(value) < 2**20 else math.inf
    if value.kind == "operation" and value.name in ("add", "sub", "abs", "neg") and not value.keywords:
        return sum(map(_terms, value.arguments))
    return 1 if value.kind == "place" else _terms(value.value) if value.kind == "number" else math.inf


def places_of(result: Node) -> list[str]:
    """The places that a result is made of."""
    return [node.value for node in in_order(result) if node.kind == "place"]


def write(kind: str, graph: Graph, result: Node) -> tuple[Leaf, tuple[Tensor | Table, ...]]:
    """The rule of a mod, "mask" or "score", and what it captured.

    Raises ValueError for what kernels do not have, and TypeError for a result of the wrong dtype.
    """
    if kind == "mask" and result.dtype is not torch.bool:
        raise TypeError(f"a mask_mod must return a bool tensor; got {result.dtype}")
    if kind == "score" and result.is_integer:
        raise TypeError(f"a score_mod must return a floating-point tensor; got {result.dtype}")
    reads = [node for node in in_order(result) if node.kind == "read"]
    # A table's own reads are none of the rule's.
    slots = {read: _Slot(read, of_scores=kind == "score") for read in reads}
    outer = in_order(result, [read for read, slot in slots.items() if slot.axes is not None])
    slots = {read: slot for read, slot in slots.items() if read in outer}
    writer = _Writer(kind, slots)
    function = writer.body(result)
    if {*places_of(result)}.isdisjoint((SCORE,) if kind == "score" else AXES):
        # What does not depend on the pair has the shape of the pairs all the same.
        shape = "score == score" if kind == "score" else "row + column >= 0"
        *before, last = function
        made = last.removeprefix("return ")
        function = (*before, f"return tl.where({shape}, {made}, {made})")
    derivative: tuple[str, ...] | None = None
    gradients, steepest = list[GradientSource](), 1.0
    if kind == "score":
        differentiable = [read for read in slots if not read.is_integer and slots[read].axes is not None]
        by_score, *by_reads = slopes(graph, result, (graph.place(SCORE), *differentiable))
        by_score = graph.number(0.0) if by_score is None else by_score
        derivative = None if _is_one(by_score) else writer.body(by_score)
        bound = magnitude(by_score)
        steepest = bound if math.isfinite(bound) else UNBOUNDED
        for read, slope in zip(differentiable, by_reads, strict=True):
            slope = graph.number(0.0) if slope is None else slope
            axes = slots[read].axes
            assert axes is not None
            body = None if _is_one(slope) else writer.body(slope)
            gradients.append(GradientSource(writer.number_of[read], axes, body))
    distances = [place for place, slot in enumerate(slots.values()) if slot.origin is not None]
    tensors = [f"c{place}" for place in range(len(slots))]
    parameters = (*tensors, *(f"o{place}" for place in distances), *(f"n{n}" for n in range(len(writer.numbers))))
    known = tuple((place, slot.axes) for place, slot in enumerate(slots.values()) if slot.axes is not None)
    origins = tuple((place, len(slots) + number) for number, place in enumerate(distances))
    source = ModSource(
        (*PLACES[kind], *parameters), function, derivative, tuple(gradients), known, origins, max(1.0, steepest)
    )
    numbers = (*[slot.origin for slot in slots.values() if slot.origin is not None], *writer.numbers)
    captured = (*[None] * len(slots), *numbers)
    name = source.name
    return (name, captured), tuple(slot.tensor for slot in slots.values())


def _is_one(node: Node) -> bool:
    return node.kind == "number" and node.value == 1


_AT_MOST_ONE = frozenset(("erf", "tanh", "sigmoid", "sin", "cos", "sgn", "sign", "eq", "ne", "lt", "le", "gt", "ge"))
_LIKE_FIRST = frozenset(("neg", "abs", "_to_copy", "threshold_backward"))
_LARGEST_OF = {"where": (1, 2), "masked_fill": (0, 2), "minimum": (0, 1), "maximum": (0, 1)}


def magnitude(node: Node) -> float:
    """A bound of the value's magnitude; inf where none can be seen."""
    if node.kind == "number":
        return abs(float(node.value))
    if node.kind != "operation":
        return math.inf
    name = node.name
    parts = [magnitude(x) if isinstance(x, Node) else _size(x) for x in node.arguments]
    if node.dtype is torch.bool or name in _AT_MOST_ONE:
        return 1.0
    if name in _LIKE_FIRST:
        return parts[0]
    if name in ("tanh_backward", "sigmoid_backward"):  # 1 - y² and y (1 - y) of what the first one is multiplied by
        return parts[0]
    if name == "clamp" and not node.keywords and None not in node.arguments[1:] and len(parts) == 3:
        return max(parts[1:])
    if name in _LARGEST_OF:
        return max(parts[place] for place in _LARGEST_OF[name])
    if name in ("add", "sub") and not node.keywords:
        return sum(parts)
    if name == "mul":
        return _product(parts)
    if name == "div" and not node.keywords:
        divisor = node.arguments[1]
        number = divisor.value if isinstance(divisor, Node) and divisor.kind == "number" else divisor
        return _product([parts[0], 1 / abs(number)]) if isinstance(number, (int, float)) and number else math.inf
    return math.inf


def _size(value: object) -> float:
    return abs(float(value)) if isinstance(value, (int, float)) else 0.0


def _product(parts: Iterable[float]) -> float:
    parts = list(parts)
    return 0.0 if 0.0 in parts else math.prod(parts)
