"""Mods of what they are called with: recorded once, so that torch.compile, which cannot record, may trace the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.mods import PLACES
from ..rules import Mask, Scores
from ..tracing.record import record
from ..tracing.source import write

Captured = Tensor | int
FLOATS, INTEGERS = torch.float32, torch.int64

_FIRST = 1_000_003
"""Numbers from here on stand for numbers: far enough from any that a mod says."""


def recorded_mask(mod: Callable[..., Tensor], *kinds: Any) -> Callable[..., Mask]:
    """A mask of tensors and integers.

    Args:
        mod: of (b, h, q_idx, kv_idx, *captured); reads captured tensors at these and at distances alone.
        kinds: of what it captures: (dtype, number of axes) of a tensor, ``int`` for an integer.
    """
    name, captured, order = _recorded("mask", mod, kinds)
    return lambda *given: Mask((name, _in_place(captured, given)), tuple([given[number] for number in order]))


def recorded_scores(mod: Callable[..., Tensor], *kinds: Any) -> Callable[..., Scores]:
    """The same for a change of scores; ``mod`` is of (score, b, h, q_idx, kv_idx, *captured)."""
    name, captured, order = _recorded("score", mod, kinds)
    return lambda *given: Scores(((name, _in_place(captured, given)),), tuple([given[number] for number in order]))


def _recorded(kind: str, mod: Callable[..., Tensor], kinds: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], list[int]]:
    """The name of the rule, what it captured with places for numbers, and the numbers of its tensors in order."""
    stand_ins = [
        _FIRST + place if each is int else torch.empty([1] * each[1], dtype=each[0], device="cpu")
        for place, each in enumerate(kinds)
    ]
    graph, result = record(lambda *pair: mod(*pair, *stand_ins), PLACES[kind])
    (name, captured), tensors = write(kind, graph, result)
    return name, captured, [next(n for n, x in enumerate(stand_ins) if x is tensor) for tensor in tensors]


def _in_place(captured: tuple[Any, ...], given: tuple[Captured, ...]) -> tuple[Any, ...]:
    """What a rule captured, with the numbers that are given in place of those that stand for them."""
    return tuple([given[x - _FIRST] if isinstance(x, int) and x >= _FIRST else x for x in captured])
