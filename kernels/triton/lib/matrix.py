"""Addresses: from a tensor's pointer and strides to tiles of one of its matrices.

A tensor (*leading, rows, columns) is a stack of matrices, numbered row-major over ``leading``: for q, k, v and out the
number is the batch-head. Any strides, any number of leading axes; arithmetic on strides is 64-bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Matrix(NamedTuple):
    """One matrix of a strided stack.

    pointer: its first element. row_stride, column_stride: in elements. rows: how many it has. lo: the offset from each
    element's high half to its low half (see `matmul`), a tuple of one, or () where there is no low half.
    """

    pointer: tl.tensor
    row_stride: tl.tensor
    column_stride: tl.tensor
    rows: tl.tensor
    lo: tl.tuple


@triton.jit
def matrix(pointer, index, sizes, strides, span, lo, STRIDE_MULTIPLE: tl.constexpr):
    """The rows ``span`` of matrix number ``index``. ``sizes`` are the leading sizes; the first one is never read.

    Strides but the last are in multiples of STRIDE_MULTIPLE elements. Triton specialises
    arguments only for multiples of 16; the product shows that rows 40 elements apart can be read 8 elements at a time.
    """
    unit = tl.full((), STRIDE_MULTIPLE, tl.int64)
    offset = span.first * (strides[len(sizes)] * unit)
    for axis in tl.static_range(len(sizes) - 1, -1, -1):
        if axis == 0:
            offset += index * (strides[axis] * unit)
        else:
            offset += index % sizes[axis] * (strides[axis] * unit)
            index = index // sizes[axis]
    return Matrix(pointer + offset, strides[len(sizes)] * unit, strides[len(sizes) + 1], span.length, lo)


@triton.jit
def low_half(source):
    """The matrix of the low halves."""
    return Matrix(source.pointer + source.lo[0], source.row_stride, source.column_stride, source.rows, ())


@triton.jit
def columns_from(source, first_column):
    """The matrix without the columns before ``first_column``."""
    shifted = source.pointer + tl.cast(first_column, tl.int64) * source.column_stride
    return Matrix(shifted, source.row_stride, source.column_stride, source.rows, source.lo)


@triton.jit
def tile_pointers(source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of a (ROWS, COLUMNS) tile. Only a scalar depends on ``first_row``, so loops advance it at no cost."""
    start = source.pointer + tl.cast(first_row, tl.int64) * source.row_stride
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None] * source.row_stride
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :] * source.column_stride
    return start + (rows + columns)


@triton.jit
def tile_bounds(
    source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Which elements of a tile exist; None where all do, so that the load has no predicate."""
    bounds = None
    if CHECK_ROWS:
        exists = (first_row + tl.arange(0, ROWS) < source.rows)[:, None]
        # A comparison of columns that always holds would still split the load into single elements.
        bounds = exists & tl.full([1, COLUMNS], 1, tl.int1)
        if WIDTH != COLUMNS:
            bounds = exists & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    elif WIDTH != COLUMNS:
        bounds = tl.full([ROWS, 1], 1, tl.int1) & (tl.arange(0, COLUMNS) < WIDTH)[None, :]
    return bounds


@triton.jit
def load_tile(
    source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Rows from ``first_row`` on of a matrix with WIDTH columns, padded with zeros to (ROWS, COLUMNS)."""
    pointers = tile_pointers(source, first_row, ROWS, COLUMNS)
    bounds = tile_bounds(source, first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS)
    if bounds is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=bounds, other=0.0)
    return tile


@triton.jit
def store_tile(target, tile, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the rows and columns of a (ROWS, COLUMNS) tile that exist, in the target's dtype."""
    pointers = tile_pointers(target, first_row, ROWS, COLUMNS)
    bounds = tile_bounds(target, first_row, ROWS, COLUMNS, WIDTH, True)
    tl.store(pointers, tile.to(target.pointer.dtype.element_ty), mask=bounds)
