"""Where rows live: from a tensor's pointer and strides to tiles of one of its matrices.

A tensor of shape ``(*leading, rows, columns)`` is a stack of matrices. Kernels number the stack with one flat index,
row-major over ``leading``, and `matrix` turns that index into a `Matrix`, whatever the strides and however many leading
axes there are. All arithmetic on strides is 64-bit: a single head may span more than 2**31 elements.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Matrix(NamedTuple):
    """One matrix of a strided stack.

    pointer: its first element. row_stride, column_stride: in elements. rows: how many it has. parts: the distances from
    each element to its further parts, a tuple that is empty where elements are whole (see `operands`).
    """

    pointer: tl.tensor
    row_stride: tl.tensor
    column_stride: tl.tensor
    rows: tl.tensor
    parts: tl.tuple


@triton.jit
def matrix(pointer, index, sizes, strides, span, parts, UNIT: tl.constexpr):
    """The rows ``span`` of matrix number ``index`` of a stack.

    ``sizes`` are the leading sizes, of which the first is never read.

    ``strides`` are in elements, those before the last in multiples of UNIT. Triton knows of a number that it is a
    multiple of 16, or nothing: a product with UNIT tells it that rows 40 apart can be read 8 elements at a time.
    """
    unit = tl.full((), UNIT, tl.int64)
    offset = span.first * (strides[len(sizes)] * unit)
    for axis in tl.static_range(len(sizes) - 1, -1, -1):
        if axis == 0:
            offset += index * (strides[axis] * unit)
        else:
            offset += index % sizes[axis] * (strides[axis] * unit)
            index = index // sizes[axis]
    return Matrix(pointer + offset, strides[len(sizes)] * unit, strides[len(sizes) + 1], span.length, parts)


@triton.jit
def tile_pointers(source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Addresses of a (ROWS, COLUMNS) tile. The part that varies is one scalar, so loops advance it at no cost."""
    start = source.pointer + tl.cast(first_row, tl.int64) * source.row_stride
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None] * source.row_stride
    columns = tl.arange(0, COLUMNS).to(tl.int64)[None, :] * source.column_stride
    return start + (rows + columns)


@triton.jit
def tile_bounds(
    source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """Which elements of a tile exist, or None where all do, so that the load stays unpredicated."""
    bounds = None
    if CHECK_ROWS:
        exists = (first_row + tl.arange(0, ROWS) < source.rows)[:, None]
        # A comparison of columns that always holds would still split the loads into single elements.
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
    """Rows ``first_row ...`` of a matrix ``WIDTH`` wide, padded with zeros to (ROWS, COLUMNS)."""
    pointers = tile_pointers(source, first_row, ROWS, COLUMNS)
    bounds = tile_bounds(source, first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS)
    if bounds is None:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=bounds, other=0.0)
    return tile


@triton.jit
def store_tile(target, tile, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the rows and columns of a (ROWS, COLUMNS) tile that exist, in the target's dtype."""
    pointers = tile_pointers(target, first_row, ROWS, COLUMNS)
    bounds = tile_bounds(target, first_row, ROWS, COLUMNS, WIDTH, True)
    tl.store(pointers, tile.to(target.pointer.dtype.element_ty), mask=bounds)
