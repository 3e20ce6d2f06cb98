"""Sums over the pairs of one distance, column - row: what the gradient of a relative position bias is made of."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def diagonal_sums(tiles: Tensor) -> Tensor:
    """Tiles (..., rows, columns) summed along their diagonals: (..., rows + columns - 1), from the lower left one on.

    Padded rows, read as if they were one element longer than they are, are each shifted by one against the row before,
    so that diagonals stand upright. Unlike additions to places that an index gives, sums have one order.
    """
    rows, columns = tiles.shape[-2:]
    width = rows + columns
    elements = F.pad(F.pad(tiles, (rows, 0)).flatten(-2), (0, rows))
    return elements.unflatten(-1, (rows, width + 1)).sum(-2)[..., 1:width]


def sums_of_bands(bands: Tensor, q_len: int, k_len: int) -> Tensor:
    """For each distance from 1 - q_len to k_len - 1 the sum over its pairs: (..., q_len + k_len - 1).

    Args:
        bands: (..., bands, 2, size), for each diagonal of square tiles, from the lower left one on, the sums of the
            diagonals below, and of the others; see `triton.pair_gradients`.
    """
    size = bands.shape[-1]
    # The distances of a band's second half are those of the next band's first.
    blocks = F.pad(bands[..., 0, :], (0, 0, 0, 1)) + F.pad(bands[..., 1, :], (0, 0, 1, 0))
    first = -(-q_len // size) * size - (q_len - 1)
    return blocks.flatten(-2)[..., first : first + q_len + k_len - 1]


def placed(sums: Tensor, origin: int, q_len: int, length: int) -> Tensor:
    """The `sums_of_bands` among ``length`` numbers of which number ``origin`` belongs to distance 0; 0 elsewhere."""
    before = origin - (q_len - 1)
    return F.pad(sums, (before, length - before - sums.shape[-1]))
