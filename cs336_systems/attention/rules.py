"""Masks and score changes that the caller writes: functions of a pair, which all implementations compute.

>>> @predicate
... def nearby(batch, head, row, column, distance):
...     return abs(row - column) <= at(distance, (head,))
>>> attention(q, k, v, mask=nearby(distances) & ~document(ids))

>>> @score_rule
... def decayed(score, batch, head, row, column, rate):
...     return score - at(rate, (head,)) * abs(row - column)
>>> @decayed.gradient("rate", axes="head")
... def _(score, batch, head, row, column, rate):
...     return -abs(row - column).to(tl.float32)
>>> attention(q, k, v, scores=decayed(rates))

The functions are Triton's and compute element by element; what they may use is in `cs336_systems.kernels.language`,
from where ``at`` and ``tl`` come. Rows and columns are positions in q and k, from 0 on. What follows them is captured:
tensors, read with ``at``, and numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels import rules
from ..kernels.language import jit
from ..kernels.rules import AXES, DISTANCE, NUMBERS, Code, Gradient
from .blocks import Blocks, dense_mask, find_blocks
from .sizes import Sizes
from .tracing.tables import Table
from .validation import Window

Captured = Tensor | float
_PLACES = ("batch", "head", "row", "column")
_BY_DISTANCE = tuple((*before, DISTANCE) for before in ((), ("batch",), ("head",), ("batch", "head")))


@dataclass(frozen=True, eq=False)
class Mask:
    """Which pairs are visible: an expression of predicates and the tensors that they captured.

    Combine masks with ``&``, ``|`` and ``~``; within torch.compile write ``mask.inverted()`` for ``~mask``.
    """

    expression: rules.Mask
    tensors: tuple[Tensor, ...]
    blocks: Blocks | None = None

    def with_blocks(
        self,
        q_len: int,
        k_len: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        causal: bool | str = False,
        window: Window | None = None,
        device: torch.device | str | None = None,
    ) -> Mask:
        """The same mask with lists of the blocks that it leaves anything of, which kernels then visit alone.

        Finding them looks at every pair once; they serve all calls of the same sizes, ``causal`` and ``window``, as
        those of all layers of a model, until what the mask captured changes.

        Args:
            q_len, k_len: the lengths of the calls, at least 1.
            batch, heads: those of the calls, of q. If None, the sizes that what the mask captured has along the axes
                that its rules declare to read. Calls may have any number where the mask tells none apart.
            causal, window: those of the calls, as `attention` takes them.
            device: of the calls; that of what the mask captured, or torch's default, if None.

        Raises:
            TypeError, ValueError: an argument is not what it has to be, or None where the mask does not declare it.
        """
        asked = (q_len, k_len), (batch, heads), causal, window, device
        return dataclasses.replace(self, blocks=find_blocks(self.expression, self.tensors, *asked))

    def to_tensor(
        self, q_len: int, k_len: int, *, batch: int = 1, heads: int = 1, device: torch.device | str | None = None
    ) -> Tensor:
        """The mask as a bool tensor (batch, heads, q_len, k_len), True where a query sees a key: to look at.

        Args:
            device: that of what the mask captured, or torch's default, if None.

        Raises:
            TypeError, ValueError: an argument is no integer from 1 on, or what the mask captured does not fit.
        """
        return dense_mask(self.expression, self.tensors, (batch, heads, q_len, k_len), device)

    def __and__(self, other: Mask) -> Mask:
        return self._with("and", other)

    def __or__(self, other: Mask) -> Mask:
        return self._with("or", other)

    def __invert__(self) -> Mask:
        return self.inverted()

    def inverted(self) -> Mask:
        """``~mask`` under a name: torch.compile can trace a method, but no ``~`` of a class that is not torch's."""
        return Mask(("not", self.expression), self.tensors)

    def _with(self, operator: str, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask((operator, self.expression, other.expression), self.tensors + other.tensors)


@dataclass(frozen=True, eq=False)
class Scores:
    """What becomes of scores: rules, applied in order, and the tensors that they captured. Join them with ``+``."""

    expression: rules.Scores
    tensors: tuple[Tensor | Table, ...]

    def tensors_of(self, sizes: Sizes) -> tuple[Tensor, ...]:
        """What a call of these sizes captures, tables among it."""
        return tuple(x.of(sizes) if isinstance(x, Table) else x for x in self.tensors)

    def expression_of(self, sizes: Sizes) -> rules.Scores:
        """The rules of a call of these sizes, in which gathered distances have their origin."""
        found, rest = [], iter(self.tensors)
        for name, captured in self.expression:
            numbers, code = [*captured], rules.registry[name]
            for slot in (slot for slot, item in enumerate(captured) if item is None):
                table = next(rest)
                if isinstance(table, Table) and table.order is None and slot in code.origins:
                    numbers[code.origins[slot]] = sizes.q_len - 1
            found.append((name, tuple(numbers)))
        return tuple(found)

    def __add__(self, other: Scores) -> Scores:
        if not isinstance(other, Scores):
            return NotImplemented
        return Scores(self.expression + other.expression, self.tensors + other.tensors)


class _Rule:
    """A function of pairs under a name of its own."""

    _before: tuple[str, ...] = _PLACES

    def __init__(self, function: Callable[..., Any], **code: Any) -> None:
        python = getattr(function, "fn", function)
        self._parameters = _parameters_of(function)
        if self._parameters[: len(self._before)] != self._before:
            expected = ", ".join(self._before)
            raise TypeError(
                f"{python.__name__} must take {expected} and what it captures; got ({', '.join(self._parameters)})"
            )
        name = f"{python.__module__}.{python.__qualname__}"
        self.name = rules.register(name, lambda unused: Code(_jitted(function, unused), **code))
        self.__doc__ = python.__doc__

    @property
    def code(self) -> Code:
        """What the rule computes."""
        return rules.registry[self.name]

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of what it captures."""
        return self._parameters[len(self._before) :]

    def _captured(self, captured: Sequence[Captured]) -> tuple[rules.Leaf, tuple[Tensor, ...]]:
        if len(captured) != len(self.captures):
            raise TypeError(
                f"{self.name} must be given {', '.join(self.captures) or 'nothing'}; got {len(captured)} values"
            )
        for name, value in zip(self.captures, captured, strict=True):
            if isinstance(value, bool) or not isinstance(value, (Tensor, *NUMBERS)):
                raise TypeError(f"{name} must be a tensor or a number; got {value!r} of type {type(value).__name__}")
            # torch.compile can trace comparisons of floats that it knows by a name, but not math.isfinite.
            if isinstance(value, float) and not -math.inf < value < math.inf:
                raise ValueError(f"{name} must be finite; got {value}")
        for slot in self.code.origins.values():
            origin = captured[slot]
            if not isinstance(origin, (int, torch.SymInt)):
                raise TypeError(f"{self.captures[slot]} must be an integer; got {type(origin).__name__}")
        numbers = tuple(None if isinstance(value, Tensor) else value for value in captured)
        return (self.name, numbers), tuple(value for value in captured if isinstance(value, Tensor))

    def reads(self, captured: str, axes: str, origin: str | None = None) -> tuple[str, ...]:
        """Says which axes a captured tensor has, so that calls can be refused whose sizes are others.

        Args:
            captured: the name of the tensor.
            axes: such as "batch row": of "batch", "head", "row" and "column", in this order; each of the call's size
                or larger, or 1. Or such as "head distance": the last axis is read at column - row + origin.
            origin: the name of the captured integer that is added to column - row.

        Returns:
            The axes' names.

        Raises:
            ValueError: one of the names is not what it has to be.
        """
        if captured not in self.captures:
            raise ValueError(f"captured must be one of {', '.join(self.captures) or 'nothing'}; got {captured!r}")
        names = tuple(axes.split())
        by_place = set(names) <= set(AXES) and names == tuple(name for name in AXES if name in names)
        if not by_place and names not in _BY_DISTANCE:
            expected = f"{', '.join(AXES)}, in this order, or of batch, head, {DISTANCE}"
            raise ValueError(f"axes must be of {expected}; got {axes!r}")
        slot = self.captures.index(captured)
        self.code.origins.pop(slot, None)
        if DISTANCE in names:
            others = [name for name in self.captures if name != captured]
            if origin not in others:
                expected = f"one of {', '.join(others) or 'nothing'}, as axes are {axes!r}"
                raise ValueError(f"origin must be {expected}; got {origin!r}")
            self.code.origins[slot] = self.captures.index(origin)
        elif origin is not None:
            raise ValueError(f"origin must be None, as axes are {axes!r}; got {origin!r}")
        self.code.axes[slot] = names
        return names


class Predicate(_Rule):
    """A function of (batch, head, row, column, *captured) that says what is visible; called, it gives a `Mask`."""

    def __call__(self, *captured: Captured) -> Mask:
        """The mask of this predicate with these tensors and numbers."""
        return Mask(*self._captured(captured))


class ScoreRule(_Rule):
    """A function of (score, batch, head, row, column, *captured) that changes a score; called, it gives `Scores`."""

    _before = ("score", *_PLACES)

    def __call__(self, *captured: Captured) -> Scores:
        """The change that this rule makes with these tensors and numbers."""
        leaf, tensors = self._captured(captured)
        return Scores((leaf,), tensors)

    def derivative(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates the derivative of the rule with respect to the score, of the same arguments; else it is 1."""
        self._check_arguments(function)
        self.code.derivative = _jitted(function, f"{self.name}.derivative")
        self.code.derivative_in_torch = rules.in_both(self.code.derivative)
        return function

    def gradient(self, captured: str, axes: str, origin: str | None = None) -> Callable[..., Any]:
        """Decorates d score / d element, for the element of a captured tensor that a pair reads.

        Args:
            captured: the name of the tensor.
            axes: its axes, such as "batch head": of "batch", "head", "row" and "column", in this order. Or such as
                "head distance": the last axis is read at column - row + origin.
            origin: the name of the captured integer that is added to column - row.
        """
        names = self.reads(captured, axes, origin)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            self._check_arguments(function)
            jitted = None if function is None else _jitted(function, f"{self.name}.gradient_{captured}")
            self.code.gradients[self.captures.index(captured)] = Gradient(jitted, names)
            return function

        return decorate

    def _check_arguments(self, function: Any) -> None:
        parameters = self._parameters if function is None else _parameters_of(function)
        if len(parameters) != len(self._parameters):
            expected = ", ".join(self._parameters)
            raise TypeError(
                f"the function must take what {self.name} does, ({expected}); got ({', '.join(parameters)})"
            )

    def adds(self, captured: str, axes: str, origin: str | None = None) -> None:
        """Says that the rule adds the element of a captured tensor that a pair reads: its gradient is the score's.

        The arguments are those of `gradient`.
        """
        self.gradient(captured, axes, origin)(None)


def predicate(function: Callable[..., Any]) -> Predicate:
    """Decorates a function of (batch, head, row, column, *captured) that says which pairs are visible."""
    return Predicate(function)


def score_rule(function: Callable[..., Any] | None = None, *, steepest: float = 1.0) -> Any:
    """Decorates a function of (score, batch, head, row, column, *captured) that changes a score.

    Args:
        steepest: the largest magnitude of its derivative, which float32 gradients are scaled by so that they stay in
            range.
    """
    if isinstance(steepest, bool) or not isinstance(steepest, (int, float)):
        raise TypeError(f"steepest must be a number; got {steepest!r} of type {type(steepest).__name__}")
    if not 0 < steepest < math.inf:
        raise ValueError(f"steepest must be above 0 and finite; got {steepest}")
    if function is None:
        return lambda function: ScoreRule(function, steepest=steepest)
    return ScoreRule(function, steepest=steepest)


def _parameters_of(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(getattr(function, "fn", function)).parameters)


def _jitted(function: Any, name: str) -> Any:
    """A `jit` function under a name that no other has: within a kernel Triton identifies functions by their names."""
    python = getattr(function, "fn", function)
    own = types.FunctionType(
        python.__code__, python.__globals__, python.__name__, python.__defaults__, python.__closure__
    )
    own.__qualname__ = name
    return jit(own)
