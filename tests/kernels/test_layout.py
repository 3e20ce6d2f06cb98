"""Results are dense, and lie in memory in the order of what they belong to."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.kernels.layouts import Layout, one_a_row, rows_like

X = torch.empty(2, 3, 5, 8)
LAYOUTS = [
    pytest.param(X, (2, 3, 5, 4), (60, 20, 4, 1), id="contiguous"),
    pytest.param(X.transpose(1, 2), (2, 5, 3, 4), (60, 4, 20, 1), id="length_before_heads"),
    pytest.param(X.transpose(0, 1), (3, 2, 5, 4), (20, 60, 4, 1), id="heads_before_batch"),
    pytest.param(X.mT, (2, 3, 8, 4), (96, 32, 4, 1), id="column_major"),
    pytest.param(X[..., ::2], (2, 3, 5, 4), (60, 20, 4, 1), id="spaced_columns"),
    pytest.param(X[:1, :1].expand(2, 3, 5, 8), (2, 3, 5, 4), (12, 4, 24, 1), id="expanded"),
    pytest.param(X[:0], (0, 3, 5, 4), (60, 20, 4, 1), id="no_batch"),
    pytest.param(X[:, :, :0], (2, 3, 0, 4), (12, 4, 4, 1), id="no_rows"),
]


@pytest.mark.parametrize(("x", "shape", "strides"), LAYOUTS)
def test_rows_like(x, shape, strides):
    layout = rows_like(x, 4)
    assert layout == Layout(shape, strides)
    made = layout.empty(torch.float16, torch.device("meta"))
    assert (made.shape, made.stride(), made.dtype) == (shape, strides, torch.float16)


@pytest.mark.parametrize("x", [layout.values[0] for layout in LAYOUTS])
def test_one_a_row_is_contiguous(x):
    rows = torch.empty(x.shape[:-1])
    assert one_a_row(x) == Layout(tuple(rows.shape), rows.stride())
