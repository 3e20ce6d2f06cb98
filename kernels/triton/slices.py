"""Head dimensions wider than a tile: products over them in slices, and programs that write a slice each.

A tile of rows as wide as 576 elements does not fit next to all else. So scores are summed over slices of columns, read
again for every tile; and of what a kernel writes, each program gathers one slice of columns, ``tl.program_id(1)`` says
which, and computes the scores by itself. Where a head dimension fits a tile, WIDTH <= COLUMNS, all of this is what it
is without: one slice, kept.
"""

import triton
import triton.language as tl

from .addresses import Matrix, store_tile, tile_pointers
from .operands import joined, load_operand, part_of, product, transposed


@triton.jit
def columns_from(source, first_column):
    """The matrix without the columns before."""
    shifted = source.pointer + tl.cast(first_column, tl.int64) * source.column_stride
    return Matrix(shifted, source.row_stride, source.column_stride, source.rows, source.parts)


@triton.jit
def slice_bounds(source, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a tile exist; its columns begin at ``first_column`` of WIDTH."""
    rows = first_row + tl.arange(0, ROWS) < source.rows
    return rows[:, None] & (first_column + tl.arange(0, COLUMNS) < WIDTH)[None, :]


@triton.jit
def load_slice(
    source,
    first_row,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """`load_operand` of COLUMNS columns from ``first_column`` on; of all, where they fit."""
    if WIDTH <= COLUMNS:
        operand = load_operand(source, first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS)
    else:
        bounds = slice_bounds(source, first_row, first_column, ROWS, COLUMNS, WIDTH)
        shifted = columns_from(source, first_column)
        operand = (tl.load(tile_pointers(shifted, first_row, ROWS, COLUMNS), mask=bounds, other=0.0),)
        if len(source.parts) == 1:
            low = tile_pointers(part_of(shifted, source.parts[0]), first_row, ROWS, COLUMNS)
            operand = (operand[0], tl.load(low, mask=bounds, other=0.0))
    return operand


@triton.jit
def store_slice(target, tile, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """`store_tile` to COLUMNS columns from ``first_column`` on; to all, where they fit."""
    if WIDTH <= COLUMNS:
        store_tile(target, tile, first_row, ROWS, COLUMNS, WIDTH)
    else:
        bounds = slice_bounds(target, first_row, first_column, ROWS, COLUMNS, WIDTH)
        pointers = tile_pointers(columns_from(target, first_column), first_row, ROWS, COLUMNS)
        tl.store(pointers, tile.to(target.pointer.dtype.element_ty), mask=bounds)


@triton.jit
def products_of_rows(
    left_tile,
    left,
    left_row,
    right_tile,
    right,
    right_row,
    LEFT_ROWS: tl.constexpr,
    RIGHT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each row of a tile of ``left`` times each of ``right``; the tiles are given where they hold whole rows."""
    if WIDTH <= COLUMNS:
        products = product(left_tile, transposed(right_tile), None)
    else:
        products = tl.zeros([LEFT_ROWS, RIGHT_ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            left_slice = load_slice(left, left_row, first, LEFT_ROWS, COLUMNS, WIDTH, True)
            right_slice = load_slice(right, right_row, first, RIGHT_ROWS, COLUMNS, WIDTH, True)
            products = product(left_slice, transposed(right_slice), products)
    return products


@triton.jit
def row_sums_of_products(
    left, right_tile, right, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    """For each row the sum of ``left * right``; the tile of ``right`` is given where it holds whole rows."""
    if WIDTH <= COLUMNS:
        sums = tl.sum(joined(load_operand(left, first_row, ROWS, COLUMNS, WIDTH, True)) * joined(right_tile), 1)
    else:
        sums = tl.zeros([ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            left_slice = load_slice(left, first_row, first, ROWS, COLUMNS, WIDTH, True)
            right_slice = load_slice(right, first_row, first, ROWS, COLUMNS, WIDTH, True)
            sums += tl.sum(joined(left_slice) * joined(right_slice), 1)
    return sums
