"""Rules that do not say how scores depend on what they captured: autograd differentiates them, on torch's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .pairs import Pairs

Pull = Callable[..., tuple[Tensor, ...]]
"""From the gradients of scores that a rule made to those of the score before, and of captured tensors."""


class Traced(NamedTuple):
    """What autograd knows of the scores that a rule made of captured tensors for which it has no `gradient`.

    numbers: the tensors'. slope: the derivative of the rules after this one.
    """

    numbers: tuple[int, ...]
    pull: Pull
    slope: Tensor | float

    def add_to(self, totals: dict[int, Tensor], dscores: Tensor, pairs: Pairs, rows: slice, columns: slice) -> None:
        """Add to the tensors' gradients what the score gradients of these pairs contribute."""
        _, *gradients = self.pull(dscores * self.slope)
        for number, gradient in zip(self.numbers, gradients, strict=True):
            totals[number] += gradient


def trace(function: Callable[..., Tensor], arguments: tuple[Any, ...], asked: Sequence[int]) -> tuple[Tensor, Pull]:
    """What a rule makes of its arguments, and autograd's way back to the score and to the arguments ``asked``."""
    scores = arguments[0]

    def changed(score: Tensor, *tensors: Tensor) -> Tensor:
        given = dict(zip((0, *asked), (score, *tensors), strict=True))
        return function(*[given.get(number, argument) for number, argument in enumerate(arguments)])

    # In the dtype of the sums, because one element may be read by many pairs.
    made, pull, *_ = torch.func.vjp(changed, scores, *[arguments[number].to(scores.dtype) for number in asked])
    return made, pull
