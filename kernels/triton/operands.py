"""Matrix products of 16-bit operands, and float32 ones made of them.

Tensor cores multiply 16-bit numbers twice as fast as TF32 ones, in either orientation, and float16 keeps as many
mantissa bits as TF32. So a float32 matrix is rewritten once as ``unit * (high + low)``: two float16 parts and a power
of two. One part gives TF32's error; with both, ``high @ high + high @ low + low @ high`` gives float32's, since what it
leaves out is 2**-22 of the result (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores", 2022).
Where ``unit`` comes from: `units`.
"""

import triton
import triton.language as tl

from .addresses import Matrix, load_tile


@triton.jit
def part_of(source, distance):
    """The matrix of one of the further parts."""
    return Matrix(source.pointer + distance, source.row_stride, source.column_stride, source.rows, ())


@triton.jit
def load_operand(
    source, first_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr
):
    """A tile of a matrix as a tuple of its parts, the leading one first, padded with zeros."""
    operand = (load_tile(source, first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS),)
    if len(source.parts) == 1:
        low = load_tile(part_of(source, source.parts[0]), first_row, ROWS, COLUMNS, WIDTH, CHECK_ROWS)
        operand = (operand[0], low)
    return operand


@triton.jit
def split(tile, like):
    """A computed float32 tile as an operand of the same kind as ``like``."""
    operand = (tile.to(like[0].dtype),)
    if len(like) == 2:
        operand = (operand[0], (tile - operand[0].to(tl.float32)).to(like[0].dtype))
    return operand


@triton.jit
def joined(operand):
    """The float32 tile that an operand stands for."""
    tile = operand[0].to(tl.float32)
    if len(operand) == 2:
        tile += operand[1].to(tl.float32)
    return tile


@triton.jit
def transposed(operand):
    """The operand with rows and columns exchanged."""
    result = (operand[0].T,)
    if len(operand) == 2:
        result = (operand[0].T, operand[1].T)
    return result


@triton.jit
def negated(operand):
    """The operand with its sign changed."""
    result = (-operand[0],)
    if len(operand) == 2:
        result = (-operand[0], -operand[1])
    return result


@triton.jit
def product(left, right, accumulator):
    """accumulator + left @ right; the accumulator may be None."""
    if len(left) == 2:
        # Tensor cores truncate each sum, a bias that would grow with the length: their sums stay within a tile, and
        # the tiles are added up with rounding.
        partial = tl.dot(left[1], right[0])
        partial = tl.dot(left[0], right[1], partial)
        partial = tl.dot(left[0], right[0], partial)
        if accumulator is not None:
            partial += accumulator
    else:
        partial = tl.dot(left[0], right[0], accumulator)
    return partial
