"""Parts of the backward that are plain PyTorch, for every backend. Imports no Triton."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient (heads,) of attention sinks (Xiao et al., 2023), from lse and delta (*batch, heads, q_len).

    A sink is a key whose value is 0: its score gradient is p * (0 - delta), delta = rowsum(dout * out) - dlse.
    """
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -math.inf, math.inf))
    return -(p * delta).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)


def diagonal_sums(tiles: Tensor) -> Tensor:
    """Sums of tiles (..., rows, columns) along their diagonals, the lower left first: (..., rows + columns - 1).

    Padded rows, reinterpreted as one element longer, are each shifted by one, so that diagonals become columns. Unlike
    additions by index, this always sums in the same order.
    """
    rows, columns = tiles.shape[-2:]
    width = rows + columns
    elements = F.pad(F.pad(tiles, (rows, 0)).flatten(-2), (0, rows))
    return elements.unflatten(-1, (rows, width + 1)).sum(-2)[..., 1:width]


def locate_rows(starts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each packed row, and the row's index in that sequence.

    Args:
        starts: (sequences + 1,) cumulative lengths. Rows after the last sequence count as one more sequence.
        rows: integers of any shape, from 0 on.
    """
    sequence = torch.searchsorted(starts[1:].contiguous(), rows.contiguous(), right=True)
    return sequence, rows - torch.where(sequence == 0, 0, starts[sequence])
