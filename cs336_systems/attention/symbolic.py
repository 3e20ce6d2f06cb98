"""Comparisons of sizes that may be symbolic, as torch.compile and torch.export trace them."""

from __future__ import annotations

import torch

from ..kernels.torch_names import holds_for_all_sizes

FAR = 2**29
"""Window sides from here on are clamped before they are compared with symbolic lengths."""


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds; while torch traces, whether it holds for all sizes of the traced program."""
    return holds_for_all_sizes(condition) if torch.compiler.is_compiling() else bool(condition)


def smallest_of(x: int, y: int) -> int:
    """min(x, y). torch 2.11 does not compile `torch.sym_min` of numbers."""
    return min(x, y) if type(x) is int and type(y) is int else torch.sym_min(x, y)


def largest_of(x: int, y: int) -> int:
    """max(x, y), likewise."""
    return max(x, y) if type(x) is int and type(y) is int else torch.sym_max(x, y)


def clamp_side(side: int | None, length: int) -> int | None:
    """A side of a window that hides the same in sequences of this length: None if it hides nothing.

    Kernels count in 32 bits; the caller may give any integer from 0 on.
    """
    if side is None or is_known(side >= length - 1):
        return None
    return side if side < FAR else smallest_of(min(side, FAR**2), length)
