"""Rules whose whole code is text: what a traced mod computes, as the name of its rule.

A name that is text is its rule in any process, so that programs which `torch.export` saved need no other module, and
equal mods share what was compiled for one of them.
"""

from __future__ import annotations

import hashlib
from ast import literal_eval
from typing import Any, NamedTuple

from .language import at, floor_divide, inside, remainder, tanh, tl, written
from .rules import MOD, Code, Gradient, in_both

LANGUAGE = {"at": at, "floor_divide": floor_divide, "inside": inside, "remainder": remainder, "tanh": tanh, "tl": tl}
"""The names that the text uses."""


class GradientSource(NamedTuple):
    """d score / d element of the captured tensor at a position: the lines of a function, None for 1; and its axes."""

    slot: int
    axes: tuple[str, ...]
    lines: tuple[str, ...] | None


class ModSource(NamedTuple):
    """A rule as text; see `rules.Code`.

    Attributes:
        parameters: of all its functions.
        function, derivative: the lines of each; None for a derivative of 1.
        axes: (position, axes) of captured tensors.
        origins: (position of a captured tensor, position of its captured origin).
    """

    parameters: tuple[str, ...]
    function: tuple[str, ...]
    derivative: tuple[str, ...] | None
    gradients: tuple[GradientSource, ...]
    axes: tuple[tuple[int, tuple[str, ...]], ...]
    origins: tuple[tuple[int, int], ...]
    steepest: float


def name_of(source: ModSource) -> str:
    """The name of a rule, from which `code_of` makes it."""
    return MOD + repr(tuple([tuple(map(tuple, part)) if part is source.gradients else part for part in source]))


def code_of(name: str) -> Code:
    """The rule with a name of `name_of`."""
    fields = literal_eval(name.removeprefix(MOD))
    source = ModSource(*fields)._replace(gradients=tuple(GradientSource(*each) for each in fields[3]))
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]

    def function(suffix: str, lines: tuple[str, ...] | None) -> Any:
        if lines is None:
            return None
        return written(f"mod_{digest}{suffix}", ", ".join(source.parameters), lines, LANGUAGE)

    return Code(
        function("", source.function),
        derivative=(derivative := function("_derivative", source.derivative)),
        steepest=source.steepest,
        gradients={each.slot: Gradient(function(f"_{each.slot}", each.lines), each.axes) for each in source.gradients},
        axes=dict(source.axes),
        origins=dict(source.origins),
        derivative_in_torch=in_both(derivative),
    )
