"""Checks of what variants are given; messages name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

from ..validation import largest_of, smallest_of

MOST = 2**30
"""No position is as far as this from another, and sums of two such numbers fit 32 bits."""


def integer(name: str, value: int, least: int | None = None) -> int:
    """The value, if it is an integer, and at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer; got {value!r} of type {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
    return value


def rows(name: str, value: int, least: int | None = None) -> int:
    """The value, if it is an integer, or the nearest that means the same of positions, which are counted in 32 bits."""
    return largest_of(smallest_of(integer(name, value, least), MOST), -MOST)


def tensor(name: str, value: Tensor) -> Tensor:
    """The value, if it is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")
    return value
