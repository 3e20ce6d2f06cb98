"""Rules: what a mod computes, as text. A rule's name is all of its text, from which its code is made where needed.

So a name is its rule in any process, programs that `torch.export` saved need no other module, and equal mods share what
was compiled for one of them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .language import (
    apart,
    at,
    at_least,
    at_most,
    bounded,
    compared,
    congruent,
    difference,
    far_float,
    floor_divide,
    in_torch,
    inside,
    less,
    near_float,
    remainder,
    sigmoid,
    tanh,
    tl,
    written,
)
from .torch_names import constant_when_traced

AXES = ("batch", "head", "row", "column")
DISTANCE = "distance"
"""Of a pair: column - row. An axis that is read at this and an origin comes after "batch" and "head"."""
SCORE = "score"
PLACES = {"mask": AXES, "score": (SCORE, *AXES)}
"""The first parameters of a rule's functions, by its kind."""

LANGUAGE = {
    "apart": apart,
    "as_float": near_float,
    "at": at,
    "at_least": at_least,
    "at_most": at_most,
    "bounded": bounded,
    "compared": compared,
    "congruent": congruent,
    "difference": difference,
    "floor_divide": floor_divide,
    "inside": inside,
    "less": less,
    "remainder": remainder,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "tl": tl,
}
"""The names that the text uses."""
NEAR = 2**22
"""Up to these lengths, integers that the text converts by ``as_float`` are exact in float32."""

InTorch = dict[torch.dtype, Callable[..., Any]]
"""A `jit` function on torch's tensors, by what stands for float32."""


class GradientSource(NamedTuple):
    """d score / d element of the captured tensor at a position: the lines of a function, None for 1; and its axes."""

    slot: int
    axes: tuple[str, ...]
    lines: tuple[str, ...] | None


class ModSource(NamedTuple):
    """A rule as text.

    Attributes:
        parameters: of all its functions: `PLACES`, and what it captured.
        function, derivative: the lines of each, the latter by the score; None for a derivative of 1.
        gradients: of the captured tensors that may need one.
        axes: (position, axes) of captured tensors that are indexed by places alone, or by a distance.
        origins: for the latter, (position of the tensor, position of the captured number added to the distance).
        steepest: the largest magnitude of the derivative, at least 1.
    """

    parameters: tuple[str, ...]
    function: tuple[str, ...]
    derivative: tuple[str, ...] | None = None
    gradients: tuple[GradientSource, ...] = ()
    axes: tuple[tuple[int, tuple[str, ...]], ...] = ()
    origins: tuple[tuple[int, int], ...] = ()
    steepest: float = 1.0

    @property
    def name(self) -> str:
        """The name of the rule, from which `Code.of` makes it."""
        return repr(tuple([tuple(map(tuple, part)) if part is self.gradients else part for part in self]))

    def is_affine_in(self, slot: int) -> bool:
        """Whether a score is a factor, not 0, times what is read of a captured tensor, plus what is not read of it."""
        lines = next((each.lines or () for each in self.gradients if each.slot == slot), (_ZERO,))
        return _ZERO not in lines and not any(f"at(c{slot}," in line for line in (*lines, *(self.derivative or ())))

    @property
    def is_singular(self) -> bool:
        """Whether its functions may make NaN or infinity of a score of 0: they divide, but by a captured number, or
        take roots or logarithms.
        """
        of_captured = itertools.chain.from_iterable(each.lines or () for each in self.gradients)
        return any(map(_SINGULAR.search, (*self.function, *(self.derivative or ()), *of_captured)))

    @property
    def is_curved(self) -> bool:
        """Whether its derivative depends on the score."""
        return any(SCORE in line for line in self.derivative or ())


_ZERO = "return 0.0"
_SINGULAR = re.compile(r"/ (?!n\d+\b)|tl\.(?:r?sqrt|log)")


def in_both(function: Any) -> InTorch:
    """A function with either dtype for float32, made at once: torch.compile can call functions, but not make them."""
    return {} if function is None else {wide: in_torch(function, wide) for wide in (torch.float32, torch.float64)}


@dataclass
class Gradient:
    """d score / d element, for the element that a pair reads of a captured tensor with these axes; None for 1."""

    code: Any
    axes: tuple[str, ...]
    in_torch: InTorch = field(init=False)

    def __post_init__(self) -> None:
        self.in_torch = in_both(self.code)


@dataclass
class Code:
    """The `jit` functions of a rule, and the same on torch's tensors; see `ModSource`.

    gradients, axes and origins are by the position of a captured tensor; affine: see `ModSource.is_affine_in`.
    is_singular, is_curved: see there too.
    """

    function: Any
    derivative: Any
    steepest: float
    gradients: dict[int, Gradient]
    axes: dict[int, tuple[str, ...]]
    origins: dict[int, int]
    affine: frozenset[int]
    is_singular: bool
    is_curved: bool
    in_torch: InTorch = field(init=False)
    derivative_in_torch: InTorch = field(init=False)

    def __post_init__(self) -> None:
        self.in_torch, self.derivative_in_torch = in_both(self.function), in_both(self.derivative)

    @classmethod
    def of(cls, name: str, language: dict[str, Any] = LANGUAGE) -> Code:
        """The code of a rule. Raises ValueError or SyntaxError where this is no name of one."""
        fields = literal_eval(name)
        source = ModSource(*fields)._replace(gradients=tuple(GradientSource(*each) for each in fields[3]))
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]

        def function(suffix: str, lines: tuple[str, ...] | None) -> Any:
            # Within a kernel Triton takes functions of one name and types for one function, whatever they compute.
            parameters = ", ".join(source.parameters)
            return None if lines is None else written(f"mod_{digest}{suffix}", parameters, lines, language)

        return cls(
            function("", source.function),
            function("_derivative", source.derivative),
            source.steepest,
            {each.slot: Gradient(function(f"_{each.slot}", each.lines), each.axes) for each in source.gradients},
            dict(source.axes),
            dict(source.origins),
            frozenset(slot for slot, _ in source.axes if source.is_affine_in(slot)),
            source.is_singular,
            source.is_curved,
        )

    def origin(self, slot: int, captured: tuple[Any, ...]) -> int:
        """The index of distance 0 along the last axis of a captured tensor; 0 where that is no axis of distances."""
        return captured[self.origins[slot]] if slot in self.origins else 0


class _Registry(dict[str, Code]):
    def __missing__(self, name: str) -> Code:
        return self.setdefault(name, Code.of(name))


registry = _Registry()
"""The code of rules by their names."""


@functools.cache
def far_code_of(name: str) -> Code:
    """The code of a rule in kernels for lengths above `NEAR`."""
    return Code.of(name, LANGUAGE | {"as_float": far_float})


class _Traced:
    """The code of rules as attributes: torch.compile sees those that came while it traces, and guards on no other."""


_traced = _Traced()


@constant_when_traced
def _attribute_of(name: str) -> str:
    attribute = "mod_" + hashlib.sha256(name.encode()).hexdigest()
    setattr(_traced, attribute, registry[name])
    return attribute


def code_of(name: str) -> Code:
    """The code of a rule, also where torch.compile traces."""
    if not torch.compiler.is_compiling():
        return registry[name]
    code: Code = getattr(_traced, _attribute_of(name))
    return code


SOFTCAP = ModSource(
    (*PLACES["score"], "cap"),
    ("return cap * tanh(score / cap)",),
    ("ratio = tanh(score / cap)", "return 1.0 - ratio * ratio"),
).name
"""The name of the rule cap * tanh(score / cap)."""
