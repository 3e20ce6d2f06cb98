"""What kernels compute apart from tensors and the scale, as a value that operators can carry: a text, and numbers.

Numbers are kept out of the text because torch.compile may know them only by a name, such as a difference of lengths.

Imports no Triton: every implementation needs it.
"""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .rules import Mask, Scores
from .torch_names import constant_when_traced, holds_for_all_sizes

Window = tuple[int | None, int | None]
"""How many keys before and after its own position a query sees; None for all."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
"""Those of a traced call stand for any."""

MOST_ROWS = 2**30 - 1
"""Of q and of k: sums of two numbers of rows have to fit 32 bits."""

FAR = 2**29
"""What the sides of a window are below where they are compared to lengths that are known by a name alone."""

BLOCK = 128
"""Rows and columns of a block of pairs that is visited or skipped as a whole."""

THRESHOLD_BITS = 31
"""Of the random number that decides whether a weight is dropped."""


@dataclass(frozen=True)
class Settings:
    """What is visible, what becomes of scores, and how many weights are dropped.

    causal: "none", "top_left" or "bottom_right". window: as `Window` says; positions are aligned as ``causal`` says,
    and at the ends where it says nothing. dropout: the part of the weights that is dropped, if any. mask, scores: see
    `rules`. sinks: whether each head has a logit that takes part in the softmax without a value. blocks: whether lists
    of the visible blocks are given. packed: the lengths (of q, of k) that no packed sequence exceeds, None where that
    is not said; or None where each matrix is one sequence. deterministic: whether results have to be the same to the
    bit on every run.
    """

    causal: str = "none"
    window: Window = (None, None)
    dropout: float | None = None
    mask: Mask | None = None
    scores: Scores = ()
    sinks: bool = False
    blocks: bool = False
    packed: tuple[int | None, int | None] | None = None
    deterministic: bool = False

    @property
    def text(self) -> str:
        """All but the numbers, as `of` reads it."""
        return text_of(*structure_of(self.fields))

    @property
    def numbers(self) -> list[float]:
        """The numbers that `text` leaves out."""
        return numbers_of(self.fields)

    @property
    def fields(self) -> tuple[Any, ...]:
        """Its fields, in order."""
        of_pairs = self.causal, self.window, self.dropout, self.mask, self.scores
        return *of_pairs, self.sinks, self.blocks, self.packed, self.deterministic

    @staticmethod
    def of(text: str, numbers: Sequence[float]) -> Settings:
        """The settings with this `text` and these `numbers`; an integer in a float's place is its `bits_of`."""
        return Settings(*_filled(ast.literal_eval(text), iter(numbers)))

    @property
    def dropout_threshold(self) -> int:
        """Weights are dropped where a random number of `THRESHOLD_BITS` bits is below this."""
        return round((self.dropout or 0.0) * 2**THRESHOLD_BITS)

    @property
    def kept_scale(self) -> float:
        """What the weights that are kept are multiplied by, so that their mean stays."""
        dropout = self.dropout or 0.0
        return 0.0 if dropout == 1.0 else 1.0 / (1.0 - dropout)

    @property
    def to_the_end(self) -> bool:
        """Whether the last row's own column is the last, rather than the first row's the first."""
        return self.causal != "top_left"

    def band(self, q_len: int, k_len: int) -> Window:
        """Row i sees the columns from i + left to i + right; None where there is no such limit.

        Of packed sequences i counts from the row whose own column is the first.
        """
        shift = 0 if self.packed is not None or not self.to_the_end else k_len - q_len
        before, after = self.window
        if self.causal != "none":
            after = 0 if after is None else min(after, 0)
        return None if before is None else shift - before, None if after is None else shift + after


def within_lengths(window: Window, causal: str, q_len: int, k_len: int) -> Window:
    """The window that hides the same of sequences up to these lengths: None for a side that hides nothing.

    Kernels count in 32 bits, and its sides may be any integers from 0 on.
    """
    furthest = (q_len, k_len) if causal == "top_left" else (k_len, q_len)
    before, after = [_within(side, length) for side, length in zip(window, furthest, strict=True)]
    return before, after if causal == "none" else None


def _within(side: int | None, length: int) -> int | None:
    if side is None or is_known(side >= length - 1):
        return None
    return side if side < FAR else smallest_of(min(side, FAR**2), length)


def smallest_of(x: int, y: int) -> int:
    """The smaller one, which may be symbolic. torch 2.11 does not compile `torch.sym_min` of numbers."""
    return min(x, y) if type(x) is int and type(y) is int else torch.sym_min(x, y)


def largest_of(x: int, y: int) -> int:
    """The larger one, likewise."""
    return max(x, y) if type(x) is int and type(y) is int else torch.sym_max(x, y)


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds; while torch traces, whether it holds for all sizes that what is traced is for."""
    return holds_for_all_sizes(condition) if torch.compiler.is_compiling() else bool(condition)


def structure_of(fields: Any) -> Any:
    """Fields with 0 in place of every number."""
    if isinstance(fields, tuple):
        return tuple([structure_of(field) for field in fields])
    if isinstance(fields, (float, torch.SymFloat)):
        return 0.0
    return 0 if isinstance(fields, (int, torch.SymInt)) and not isinstance(fields, bool) else fields


def numbers_of(fields: Any) -> list[Any]:
    """The numbers among fields, in order."""
    if isinstance(fields, tuple):
        return [number for field in fields for number in numbers_of(field)]
    return [fields] if isinstance(fields, NUMBERS) and not isinstance(fields, bool) else []


def _filled(structure: Any, numbers: Iterator[float]) -> Any:
    if isinstance(structure, tuple):
        return tuple([_filled(part, numbers) for part in structure])
    if isinstance(structure, float):
        number = next(numbers)
        return number if isinstance(number, (float, torch.SymFloat)) else float_of(number)
    return int(next(numbers)) if isinstance(structure, int) and not isinstance(structure, bool) else structure


@constant_when_traced
def bits_of(number: float) -> int:
    """The bits of a float, as one integer that stands for it among integers."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def float_of(bits: int) -> float:
    """The float that has these bits."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


_texts: dict[tuple[Any, ...], str] = {}


@constant_when_traced
def text_of(*structure: Any) -> str:
    """The structure of settings as text."""
    text = _texts.get(structure)
    if text is None:
        text = _texts[structure] = repr(structure)
    return text
