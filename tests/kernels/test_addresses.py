"""Addresses of tiles, computed but never loaded from: no tensor need be as large as what is tested."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from cs336_systems.kernels.lib.varlen import Span
from cs336_systems.kernels.triton.lib.matrix import matrix, tile_pointers
from cs336_systems.kernels.versions import compile_options

ROWS = COLUMNS = 16
FAR = 2**30 + 24  # fits 32 bits; twice this does not


@triton.jit(do_not_specialize=["index", "first", "first_row"])
def distances_kernel(
    pointer,
    distances,
    index,
    sizes,
    strides,
    first,
    first_row,
    STRIDE_MULTIPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Bytes from the tensor's first element to each element of a tile."""
    source = matrix(pointer, index, sizes, strides, Span(first, 0), (), STRIDE_MULTIPLE)
    pointers = tile_pointers(source, first_row, ROWS, COLUMNS)
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(distances + offsets, pointers.to(tl.int64) - pointer.to(tl.int64))


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        pytest.param((7,), (96, 32, 2), id="near"),
        pytest.param((7,), (FAR, 32, 1), id="batch"),
        pytest.param((2, 4), (96, FAR, 32, 1), id="heads"),
        pytest.param((2, 2, 2), (FAR, 640, 96, 32, 1), id="first_of_three_axes"),
        pytest.param((7,), (96, FAR, 1), id="rows"),
        pytest.param((7,), (96, 1, FAR), id="columns"),
        pytest.param((7,), (2**33, 2**32, 2**31), id="strides_beyond_32_bits"),
        pytest.param((2, 4), (0, 96, 32, 1), id="expanded"),
    ],
)
@pytest.mark.parametrize(("first", "first_row", "multiple"), [(0, 0, 1), (5, 48, 1), (0, 48, 8), (2**20, 0, 8)])
def test_distances_within_a_tensor(flash_device, sizes, strides, first, first_row, multiple):
    x = torch.empty(1, dtype=torch.float16, device=flash_device)
    index = 6
    distances = torch.empty(ROWS, COLUMNS, dtype=torch.int64, device=flash_device)
    distances_kernel[(1,)](
        x, distances, index, (0, *sizes[1:]), strides, first, first_row, multiple, ROWS, COLUMNS, **compile_options()
    )
    where = 0
    for size, stride in zip(reversed(sizes), reversed(strides[:-2]), strict=True):
        index, position = divmod(index, size)
        where += position * stride * multiple
    rows = (first + first_row + torch.arange(ROWS))[:, None] * strides[-2] * multiple
    columns = torch.arange(COLUMNS)[None, :] * strides[-1]
    assert torch.equal(distances.cpu(), 2 * (where + rows + columns))
