"""Where rows of packed sequences belong, on torch's tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def in_sequences(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each row or column, counted on after the last, and its place there.

    Args:
        starts: (sequences + 1,) integers, where each begins; the last is where the last one ends.
        rows: integers of any shape, from 0 on.
    """
    sequence = torch.searchsorted(starts[1:].contiguous(), rows.contiguous(), right=True)
    return sequence, rows - torch.where(sequence == 0, 0, starts[sequence])
