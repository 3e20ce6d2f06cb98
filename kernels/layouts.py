"""Shapes and strides of tensors that are like others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes that TMA and vector loads want addresses to be multiples of."""


class Layout(NamedTuple):
    """A tensor's shape and strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor of this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


def rows_like(x: Tensor, width: int) -> Layout:
    """(*x.shape[:-1], width), dense, its axes in memory in the order of x's, and its rows contiguous."""
    shape = (*x.shape[:-1], width)
    strides = [0] * x.ndim
    step = 1
    # Of equal strides, as expanded axes have, the later axis comes first in memory, as in a contiguous tensor.
    for axis in [x.ndim - 1, *sorted(range(x.ndim - 1), key=lambda axis: (x.stride(axis), -axis))]:
        strides[axis] = step
        step *= max(1, shape[axis])
    return Layout(shape, tuple(strides))


def one_a_row(x: Tensor) -> Layout:
    """x.shape[:-1], contiguous."""
    shape = tuple(x.shape[:-1])
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(1, shape[axis + 1])
    return Layout(shape, tuple(strides))


def has_tma_strides(x: Tensor) -> bool:
    """Whether TMA takes a tensor's strides: rows are contiguous, other strides multiples of `ALIGNMENT` bytes."""
    multiple = ALIGNMENT // x.element_size()
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.stride(-1) == 1 and all(size == 1 or (stride > 0 and stride % multiple == 0) for size, stride in outer)


def without_data(x: Tensor) -> Tensor:
    """A tensor on the meta device with the metadata of x."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
