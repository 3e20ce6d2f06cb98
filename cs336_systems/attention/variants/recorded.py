"""Mods of what they are called with: recorded once, so that torch.compile, which cannot record, may trace the calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...kernels.mods import PLACES
from ...kernels.rules import Leaf
from ...kernels.torch_names import exporting
from ..mods import mask_mod
from ..rules import Mask, Scores
from ..tracing.operations import STAND_INS
from ..tracing.record import record
from ..tracing.source import write

Made = TypeVar("Made", Mask, Scores)
Captured = Tensor | int
FLOATS, INTEGERS = torch.float32, torch.int64


def recorded_mask(mod: Callable[..., Tensor], *kinds: Any) -> Callable[..., Mask]:
    """A mask of tensors and integers.

    Args:
        mod: of (b, h, q_idx, kv_idx, *captured); reads captured tensors at these and at distances alone.
        kinds: of what it captures: (dtype, number of axes) of a tensor, ``int`` for an integer.
    """
    return _recorded("mask", mod, kinds, Mask)


def mask_of_divisor(mod: Callable[..., Tensor]) -> Callable[[int], Mask]:
    """A mask of an integer, by which ``mod`` of (b, h, q_idx, kv_idx, divisor) divides.

    It is part of the rule, because no GPU has an instruction to divide. Where torch.export traces, which with
    strict=False cannot record, the rule captures it.
    """
    of_captured = recorded_mask(mod, int)

    def make(divisor: int) -> Mask:
        if exporting():
            return of_captured(divisor)
        return mask_mod(lambda b, h, q_idx, kv_idx: mod(b, h, q_idx, kv_idx, divisor))

    return make


def recorded_scores(mod: Callable[..., Tensor], *kinds: Any) -> Callable[..., Scores]:
    """The same for a change of scores; ``mod`` is of (score, b, h, q_idx, kv_idx, *captured)."""
    return _recorded("score", mod, kinds, lambda leaf, tensors: Scores((leaf,), tensors))


def _recorded(
    kind: str, mod: Callable[..., Tensor], kinds: tuple[Any, ...], make: Callable[[Leaf, tuple[Tensor, ...]], Made]
) -> Callable[..., Made]:
    """What ``make`` gives of a rule and its tensors, as a function of what the rule captures."""
    stand_ins = [
        STAND_INS + place if each is int else torch.empty([1] * each[1], dtype=each[0], device="cpu")
        for place, each in enumerate(kinds)
    ]
    try:
        graph, result = record(lambda *pair: mod(*pair, *stand_ins), PLACES[kind])
    except RuntimeError as lacking:  # a torch that cannot record: what needs no rule is there all the same
        return functools.partial(_refuse, str(lacking))
    (name, captured), tensors = write(kind, graph, result)
    order = [next(n for n, x in enumerate(stand_ins) if x is tensor) for tensor in tensors]
    return lambda *given: make((name, _in_place(captured, given)), tuple([given[number] for number in order]))


def _refuse(message: str, *given: Captured) -> Any:
    raise RuntimeError(message)


def _in_place(captured: tuple[Any, ...], given: tuple[Captured, ...]) -> tuple[Any, ...]:
    """What a rule captured, with the numbers that are given in place of those that stand for them."""
    return tuple([given[x - STAND_INS] if isinstance(x, int) and x >= STAND_INS else x for x in captured])
