"""What a call computes besides plain attention, as the kernels take it: rules, what they captured, sinks and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..rules import DISTANCE, Leaf, Wanted, leaves, mask_code, registry, score_code, steepest
from ..settings import Settings, structure_of

Strides = tuple[int | None, ...]

UNBOUNDED = 2**31 - 1
"""The length of a packed sequence that may be any."""


class View(NamedTuple):
    """A captured tensor: its position among the extras, its strides (None for axes of size 1), and its sizes."""

    position: int
    strides: Strides
    sizes: tuple[int, ...]


class Differentiated(NamedTuple):
    """A captured tensor whose gradient is wanted.

    position: among the extras. axes: those that its elements differ along, among "batch", "head", "row" and "column",
    or "distance" instead of the last two; origin: the index of distance 0.
    """

    position: int
    axes: frozenset[str]
    origin: int = 0

    @property
    def kind(self) -> str:
        """Which pass gathers it: "pair" and "distance" one of its own, "column" that of dK and dV, "row" that of dQ."""
        if DISTANCE in self.axes:
            return "distance"
        if {"row", "column"} <= self.axes:
            return "pair"
        return "column" if "column" in self.axes else "row"


@dataclass(frozen=True)
class Variation:
    """Derived once for each new combination of settings and of the extras' metadata.

    ``extras`` are a call's further tensors: one of sinks, if there are any, one with the seed, if weights are dropped,
    the two lists of visible blocks, if they are given, where packed sequences of q and of k begin, if they are packed,
    and what the rules of the mask captured, then those of scores.
    """

    settings: Settings
    captured_by_mask: tuple[float | View, ...]
    captured_by_scores: tuple[float | View, ...]
    differentiated: tuple[Differentiated, ...]
    wanted: tuple[Wanted, ...]

    @classmethod
    def of(cls, settings: Settings, extras: Sequence[Tensor], wanted: Sequence[int] = ()) -> Variation:
        """``wanted`` are the positions of the captured tensors whose gradients are to be computed."""
        position = fixed_extras(settings)
        captured: list[tuple[float | View, ...]] = []
        differentiated: list[Differentiated] = []
        terms: list[Wanted] = []
        for rules in ([*leaves(settings.mask)], settings.scores):
            views: list[float | View] = []
            for number, leaf in enumerate(rules):
                for slot, item in enumerate(leaf[1]):
                    if item is not None:
                        views.append(item)
                        continue
                    views.append(_view(position, extras[position]))
                    if position in wanted:
                        differentiated.append(_differentiated(position, leaf, slot, extras[position]))
                        terms.append(Wanted(number, slot))
                    position += 1
            captured.append(tuple(views))
        return cls(settings, captured[0], captured[1], tuple(differentiated), tuple(terms))

    def captured(self, extras: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]] | None:
        """What rules captured, if there are rules, as kernels take it; ``extras`` are tensors, or their addresses."""
        if self.settings.mask is None and not self.settings.scores:
            return None
        return _filled(self.captured_by_mask, extras), _filled(self.captured_by_scores, extras)

    def sinks(self, extras: Sequence[Any]) -> Any:
        """The sinks among the extras, or None."""
        return extras[0] if self.settings.sinks else None

    def seed(self, extras: Sequence[Any]) -> Any:
        """The seed among the extras, or None."""
        return extras[self.settings.sinks] if self.settings.dropout is not None else None

    def blocks(self, extras: Sequence[Any], shapes: Sequence[Tensor], of: str) -> Any:
        """The list of blocks among the extras, "rows" or "columns", with its strides, or None.

        Those of axes of size 1 are 0.
        """
        if not self.settings.blocks:
            return None
        position = self.settings.sinks + (self.settings.dropout is not None) + (of == "columns")
        lists = shapes[position]
        batch, heads = (0 if lists.shape[axis] == 1 else lists.stride(axis) for axis in (0, 1))
        return extras[position], batch, heads, lists.stride(2)

    def packed(self, extras: Sequence[Any]) -> Any:
        """Where packed sequences of q and of k begin, among the extras, or None."""
        last = fixed_extras(self.settings)
        return None if self.settings.packed is None else (extras[last - 2], extras[last - 1])

    def sequences(self, extras: Sequence[Tensor]) -> tuple[int, int, int]:
        """How many sequences each matrix holds, and how long those of q and of k are at most; 0 if none are packed."""
        if self.settings.packed is None:
            return 0, 0, 0
        rows, columns = (UNBOUNDED if most is None else most for most in self.settings.packed)
        return extras[fixed_extras(self.settings) - 1].numel() - 1, rows, columns

    def terms(self, kind: str) -> tuple[int, ...]:
        """Which of the differentiated tensors a pass gathers."""
        return tuple(number for number, one in enumerate(self.differentiated) if one.kind == kind)

    @property
    def gathered(self) -> tuple[int, ...]:
        """Those that have a pass of their own."""
        return *self.terms("pair"), *self.terms("distance")

    def constants(self, q_len: int, k_len: int, *, backward: bool) -> dict[str, Any]:
        """The compile-time arguments that say what is visible and what becomes of scores."""
        left, right = self.settings.band(q_len, k_len)
        constants: dict[str, Any] = {"LEFT": left is not None, "RIGHT": right is not None, "MASK": None, "SCORE": None}
        if self.settings.mask is not None:
            constants["MASK"] = mask_code(structure_of(self.settings.mask))
        if self.settings.scores:
            code = score_code(structure_of(self.settings.scores), self.wanted)
            constants["SCORE"] = code.differentiate if backward else code.apply
        return constants

    @property
    def with_rules(self) -> bool:
        """Whether more becomes of pairs than a causal mask does."""
        settings = self.settings
        return bool(settings.mask or settings.scores or settings.dropout or settings.window != (None, None))

    @property
    def asks_further(self) -> bool:
        """Whether a kernel is told of rules, or takes extras."""
        return bool(self.settings.mask or self.settings.scores or fixed_extras(self.settings))

    @property
    def steepest(self) -> float:
        """By how much score gradients may exceed those of plain attention."""
        return max(1.0, steepest(self.settings.scores) * max(1.0, self.settings.kept_scale))


def fixed_extras(settings: Settings) -> int:
    """How many extras come before what rules captured."""
    before = settings.sinks + (settings.dropout is not None)
    return before + 2 * (settings.blocks + (settings.packed is not None))


def _view(position: int, tensor: Tensor) -> View:
    strides = tuple(None if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return View(position, strides, tuple(tensor.shape))


def _differentiated(position: int, leaf: Leaf, slot: int, tensor: Tensor) -> Differentiated:
    code = registry[leaf[0]]
    axes = zip(code.gradients[slot].axes, tensor.shape, strict=True)
    differing = frozenset(axis for axis, size in axes if size != 1)
    return Differentiated(position, differing, code.origin(slot, leaf[1]))


def _filled(items: tuple[float | View, ...], extras: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([(extras[x.position], x.strides, x.sizes) if isinstance(x, View) else x for x in items])
