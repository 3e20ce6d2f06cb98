"""Matrix products of 16-bit operands, float32 products made of them, and head dimensions wider than a tile.

An operand is a tuple: (tile,) of 16-bit numbers, or (high, low), the float16 halves of a float32 tile. The product
``high @ high + high @ low + low @ high`` omits 2**-22 of the result (Ootomo and Yokota, "Recovering single precision
accuracy from Tensor Cores", 2022). float16 has as many mantissa bits as TF32, twice its rate, and no preferred
orientation. See `pow2` for the scales of the halves.

Where a head dimension is wider than a tile (WIDTH > COLUMNS), scores are summed over slices of columns that are read
again for every pair of tiles, and program_id(1) says which slice of the output's columns a program computes.
"""

import triton
import triton.language as tl

from .matrix import columns_from, load_tile, low_half, store_tile, tile_pointers


@triton.jit
def split(tile, like):
    """A float32 tile as an operand with as many halves as ``like``."""
    operand = (tile.to(like[0].dtype),)
    if len(like) == 2:
        operand = (operand[0], (tile - operand[0].to(tl.float32)).to(like[0].dtype))
    return operand


@triton.jit
def joined(operand):
    """The float32 tile of an operand."""
    tile = operand[0].to(tl.float32)
    if len(operand) == 2:
        tile += operand[1].to(tl.float32)
    return tile


@triton.jit
def transposed(operand):
    """The transposed operand."""
    result = (operand[0].T,)
    if len(operand) == 2:
        result = (operand[0].T, operand[1].T)
    return result


@triton.jit
def negated(operand):
    """The operand times -1."""
    result = (-operand[0],)
    if len(operand) == 2:
        result = (-operand[0], -operand[1])
    return result


@triton.jit
def dot(left, right, acc):
    """acc + left @ right; acc may be None."""
    if len(left) == 2:
        # Tensor cores truncate each sum, a bias that grows with the number of additions. So each tile's sum starts at
        # zero, and tiles are added with rounding.
        partial = tl.dot(left[1], right[0])
        partial = tl.dot(left[0], right[1], partial)
        partial = tl.dot(left[0], right[0], partial)
        if acc is not None:
            partial += acc
    else:
        partial = tl.dot(left[0], right[0], acc)
    return partial


@triton.jit
def slice_bounds(source, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Which elements of a slice from ``first_column`` of WIDTH columns exist."""
    rows = first_row + tl.arange(0, ROWS) < source.rows
    return rows[:, None] & (first_column + tl.arange(0, COLUMNS) < WIDTH)[None, :]


@triton.jit
def load(
    source, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns from ``first_column`` on as an operand, padded with zeros; all columns where they fit."""
    if WIDTH <= COLUMNS:
        operand = (load_tile(source, first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS),)
        if len(source.lo) == 1:
            operand = (operand[0], load_tile(low_half(source), first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS))
    else:
        bounds = slice_bounds(source, first_row, first_column, ROWS, COLUMNS, WIDTH)
        shifted = columns_from(source, first_column)
        operand = (tl.load(tile_pointers(shifted, first_row, ROWS, COLUMNS), mask=bounds, other=0.0),)
        if len(source.lo) == 1:
            low = tile_pointers(low_half(shifted), first_row, ROWS, COLUMNS)
            operand = (operand[0], tl.load(low, mask=bounds, other=0.0))
    return operand


@triton.jit
def store(target, tile, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store COLUMNS columns from ``first_column`` on, in the target's dtype; all columns where they fit."""
    if WIDTH <= COLUMNS:
        store_tile(target, tile, first_row, ROWS, COLUMNS, WIDTH)
    else:
        bounds = slice_bounds(target, first_row, first_column, ROWS, COLUMNS, WIDTH)
        pointers = tile_pointers(columns_from(target, first_column), first_row, ROWS, COLUMNS)
        tl.store(pointers, tile.to(target.pointer.dtype.element_ty), mask=bounds)


@triton.jit
def dot_rows(
    left_tile, left, left_row, right_tile, right, right_row, LEFT_ROWS: tl.constexpr, RIGHT_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """left @ right.T of two tiles of rows. The given tiles are used where they hold whole rows."""
    if WIDTH <= COLUMNS:
        products = dot(left_tile, transposed(right_tile), None)
    else:
        products = tl.zeros([LEFT_ROWS, RIGHT_ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            left_slice = load(left, left_row, first, LEFT_ROWS, COLUMNS, WIDTH, True)
            right_slice = load(right, right_row, first, RIGHT_ROWS, COLUMNS, WIDTH, True)
            products = dot(left_slice, transposed(right_slice), products)
    return products


@triton.jit
def rowsum_product(left, right_tile, right, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """rowsum(left * right). The given tile of ``right`` is used where it holds whole rows."""
    if WIDTH <= COLUMNS:
        sums = tl.sum(joined(load(left, first_row, 0, ROWS, COLUMNS, WIDTH, True)) * joined(right_tile), 1)
    else:
        sums = tl.zeros([ROWS], tl.float32)
        for first in range(0, WIDTH, COLUMNS):
            left_slice = load(left, first_row, first, ROWS, COLUMNS, WIDTH, True)
            right_slice = load(right, first_row, first, ROWS, COLUMNS, WIDTH, True)
            sums += tl.sum(joined(left_slice) * joined(right_slice), 1)
    return sums
