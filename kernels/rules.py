"""Rules for pairs of a query row and a key column: which are visible, and what becomes of their scores.

What a call applies is an expression of rules, a plain value that can be hashed and written as text: it has the names of
rules (see `mods`) and the numbers that they captured, with None where a tensor was captured::

    mask    (name, captured) | ("and", mask, mask) | ("or", mask, mask) | ("not", mask)
    scores  ((name, captured), ...), applied in this order

`mask_code` and `score_code` write an expression out as one function for the kernels.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .language import NUMBERS, written
from .mods import code_of, far_code_of
from .torch_names import constant_when_traced

Leaf = tuple[str, tuple[float | None, ...]]
Mask = tuple[Any, ...]
Scores = tuple[Leaf, ...]

OPERATORS = {"and": "&", "or": "|"}


def structure_of(fields: Any) -> Any:
    """Nested tuples with 0 in place of every number: what kernels are compiled for."""
    if isinstance(fields, tuple):
        return tuple([structure_of(field) for field in fields])
    if isinstance(fields, (float, torch.SymFloat)):
        return 0.0
    return 0 if isinstance(fields, (int, torch.SymInt)) and not isinstance(fields, bool) else fields


def numbers_of(fields: Any) -> list[Any]:
    """The numbers in nested tuples, in order."""
    if isinstance(fields, tuple):
        return [number for field in fields for number in numbers_of(field)]
    return [fields] if isinstance(fields, NUMBERS) and not isinstance(fields, bool) else []


def with_numbers(structure: Any, numbers: Iterator[float]) -> Any:
    """The nested tuples that have this `structure_of` and these `numbers_of`."""
    if isinstance(structure, tuple):
        return tuple([with_numbers(field, numbers) for field in structure])
    if isinstance(structure, float):
        number = next(numbers)
        return number if isinstance(number, (float, torch.SymFloat)) else float_of(number)
    return int(next(numbers)) if isinstance(structure, int) and not isinstance(structure, bool) else structure


@constant_when_traced
def bits_of(number: float) -> int:
    """The bits of a float, as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def float_of(bits: int) -> float:
    """The float with these bits."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def leaves(mask: Mask | None) -> Iterator[Leaf]:
    """The rules of a mask, from left to right."""
    if mask is None:
        return
    if mask[0] in OPERATORS or mask[0] == "not":
        yield from itertools.chain.from_iterable(leaves(part) for part in mask[1:])
    else:
        yield mask


def axes_read(leaves: Iterable[Leaf], tensors: Iterable[Tensor]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """What rules captured, each with the axes that it is read along; without any where it is read at other indices."""
    rest = iter(tensors)
    for name, captured in leaves:
        for slot in (slot for slot, item in enumerate(captured) if item is None):
            yield code_of(name).axes.get(slot, ()), next(rest)


def tensors_of(leaf: Leaf) -> int:
    """How many tensors a rule captured."""
    return sum(value is None for value in leaf[1])


@functools.cache
def mask_code(mask: Mask, is_far: bool) -> Any:
    """A mask, its structure alone (see `settings`), as one function of (batch, head, row, column, captured).

    ``captured`` holds what all its rules captured, in one tuple: numbers as they are, and tensors as `language.at`
    takes them. Rows and columns must exist: others have to be clamped. is_far: for lengths above `mods.NEAR`.
    """
    writer = _Writer(is_far)
    body = writer.mask(mask)
    return writer.function("mask_rule", "batch, head, row, column, captured", [f"return {body}"])


class Wanted(NamedTuple):
    """A captured tensor whose gradient is wanted: its score rule's position, and its own among what that captured."""

    rule: int
    slot: int


class ScoreCode(NamedTuple):
    """Score rules, written out as functions of (score, batch, head, row, column, captured).

    apply: the score that the last rule makes. differentiate: that score, its derivative with respect to the first one,
    and a tuple with d score / d element for each `Wanted`. ``differentiate.fn.is_singular``: see `mods.ModSource`.
    """

    apply: Any
    differentiate: Any


@functools.cache
def score_code(scores: Scores, wanted: tuple[Wanted, ...], is_far: bool) -> ScoreCode:
    """The structure of score rules, one after another, as one function each way.

    The derivative is the product of theirs.
    """
    parameters = "score, batch, head, row, column, captured"
    writer = _Writer(is_far)
    calls = [writer.arguments(leaf) for leaf in scores]
    codes = [writer.code_of(leaf[0]) for leaf in scores]
    steps = [f"score = {writer.name(code.function)}(score, {call})" for code, call in zip(codes, calls, strict=True)]
    apply = writer.function("score_rule", parameters, [*steps, "return score"])
    lines, terms, outer = ["score_0 = score"], {}, "1.0"
    for number, (code, call) in enumerate(zip(codes, calls, strict=True)):
        lines.append(f"score_{number + 1} = {writer.name(code.function)}(score_{number}, {call})")
    for number in reversed(range(len(scores))):
        code, call = codes[number], f"(score_{number}, {calls[number]})"
        for slot in (want.slot for want in wanted if want.rule == number):
            own = code.gradients[slot].code
            terms[number, slot] = f"term_{number}_{slot}"
            lines.append(f"term_{number}_{slot} = {outer}" + ("" if own is None else f" * {writer.name(own)}{call}"))
        if code.derivative is not None:
            lines.append(f"slope_{number} = {outer} * {writer.name(code.derivative)}{call}")
            outer = f"slope_{number}"
    tuple_of_terms = "".join(f"{terms[want]}, " for want in wanted)
    lines.append(f"return score_{len(scores)}, {outer}, ({tuple_of_terms})")
    differentiate = writer.function("score_rule_backward", parameters, lines)
    differentiate.fn.is_singular = any(code.is_singular for code in codes)
    return ScoreCode(apply, differentiate)


def steepest(scores: Scores) -> float:
    """The largest magnitude of the derivative of score rules one after another."""
    product = 1.0
    for name, _ in scores:
        product *= code_of(name).steepest
    return product


class _Writer:
    """Source text that calls rules, and the names it calls them by."""

    def __init__(self, is_far: bool) -> None:
        self.code_of = far_code_of if is_far else code_of
        self._names: dict[str, Any] = {}
        self._captured = itertools.count()

    def name(self, code: Any) -> str:
        """What a rule's function is called in the text."""
        for known, value in self._names.items():
            if value is code:
                return known
        name = f"{getattr(code, 'fn', code).__name__.strip('_')}_{len(self._names)}"
        self._names[name] = code
        return name

    def arguments(self, leaf: Leaf) -> str:
        """The arguments of a rule's functions after the score."""
        places = [f"captured[{next(self._captured)}]" for _ in leaf[1]]
        return ", ".join(["batch", "head", "row", "column", *places])

    def mask(self, mask: Mask) -> str:
        """A mask as an expression."""
        if mask[0] in OPERATORS:
            return f"({self.mask(mask[1])} {OPERATORS[mask[0]]} {self.mask(mask[2])})"
        if mask[0] == "not":
            # A comparison, because ~ of what Triton made of a Python bool would be an integer's.
            return f"({self.mask(mask[1])} == 0)"
        return f"{self.name(self.code_of(mask[0]).function)}({self.arguments(mask)})"

    def function(self, name: str, parameters: str, lines: list[str]) -> Any:
        """A `jit` function of these lines."""
        return written(name, parameters, lines, self._names)
