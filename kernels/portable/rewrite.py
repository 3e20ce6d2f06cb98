"""Rewriting float32 inputs as the float16 parts that `operands` describes: one launch if they are short, else two."""

import triton
import triton.language as tl

from .addresses import load_tile, matrix, store_tile
from .operands import TOP, exponent_of, part_of, power_of_two


@triton.jit
def tile_statistics(tile):
    """The largest finite magnitude in a tile, and the largest norm of its rows."""
    magnitude = tl.abs(tile)
    # Infinities and NaN spoil the rows they stand in, as they must, but not the unit of all the others.
    magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.max(tl.max(magnitude, 1), 0)
    # Relative to the largest, squares neither overflow nor vanish.
    relative = magnitude / tl.where(largest > 0.0, largest, 1.0)
    return largest, largest * tl.sqrt(tl.max(tl.sum(relative * relative, 1), 0))


@triton.jit
def write_parts(target, first_row, tile, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of rows as float16 parts, in the unit of a group whose largest magnitude is ``largest``."""
    tile = tile * power_of_two(-exponent_of(largest) + TOP)
    high = tile.to(tl.float16)
    store_tile(target, high, first_row, TILE, BLOCK, WIDTH)
    if len(target.parts) == 1:
        store_tile(part_of(target, target.parts[0]), tile - high.to(tl.float32), first_row, TILE, BLOCK, WIDTH)


@triton.jit
def measure(
    x, statistics, sizes, strides, groups, group, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Take one tile of rows into its group's statistics."""
    tiles = tl.cdiv(rows, TILE)
    index = tl.program_id(0) // tiles
    if index < groups * group:
        source = matrix(x, index, sizes, strides, rows, ())
        largest, norm = tile_statistics(load_tile(source, tl.program_id(0) % tiles * TILE, TILE, BLOCK, WIDTH, True))
        # Non-negative floats are ordered as their bits are, and a maximum is the same in whatever order it is taken.
        target = (statistics + 2 * (index // group)).to(tl.pointer_type(tl.int32))
        tl.atomic_max(target, largest.to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_max(target + 1, norm.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def rewrite(
    x,
    statistics,
    parts,
    sizes,
    strides,
    part_strides,
    distances,
    groups,
    group,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
):
    """Rewrite one tile of a measured group or, with WHOLE_GROUPS, measure and rewrite a whole group."""
    if WHOLE_GROUPS:
        index = tl.program_id(0)
        largest = tl.zeros((), tl.float32)
        norm = tl.zeros((), tl.float32)
        for member in range(group):
            source = matrix(x, index * group + member, sizes, strides, rows, ())
            for first_row in range(0, rows, TILE):
                of_tile, norm_of_tile = tile_statistics(load_tile(source, first_row, TILE, BLOCK, WIDTH, True))
                largest = tl.maximum(largest, of_tile)
                norm = tl.maximum(norm, norm_of_tile)
        tl.store(statistics + 2 * index, largest)
        tl.store(statistics + 2 * index + 1, norm)
        for member in range(group):
            source = matrix(x, index * group + member, sizes, strides, rows, ())
            target = matrix(parts, index * group + member, sizes, part_strides, rows, distances)
            for first_row in range(0, rows, TILE):
                tile = load_tile(source, first_row, TILE, BLOCK, WIDTH, True)
                write_parts(target, first_row, tile, largest, WIDTH, BLOCK, TILE)
    else:
        tiles = tl.cdiv(rows, TILE)
        index = tl.program_id(0) // tiles
        if index < groups * group:
            first_row = tl.program_id(0) % tiles * TILE
            tile = load_tile(matrix(x, index, sizes, strides, rows, ()), first_row, TILE, BLOCK, WIDTH, True)
            target = matrix(parts, index, sizes, part_strides, rows, distances)
            write_parts(target, first_row, tile, tl.load(statistics + 2 * (index // group)), WIDTH, BLOCK, TILE)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups"])
def measure_kernel(
    q,
    k,
    v,
    dout,
    statistics,
    q_sizes,
    kv_sizes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    groups,
    group,
    q_len,
    k_len,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid: (tiles of the tensor that has most, tensors). ``statistics`` (tensors, groups, 2) starts at 0."""
    which = tl.program_id(1)
    own = statistics + 2 * which * groups
    if which == 0:
        measure(q, own, q_sizes, q_strides, groups, group, q_len, HEAD_DIM, BLOCK_D, TILE)
    elif which == 1:
        measure(k, own, kv_sizes, k_strides, groups, 1, k_len, HEAD_DIM, BLOCK_D, TILE)
    elif which == 2:
        measure(v, own, kv_sizes, v_strides, groups, 1, k_len, V_HEAD_DIM, BLOCK_DV, TILE)
    elif dout is not None:
        measure(dout, own, q_sizes, dout_strides, groups, group, q_len, V_HEAD_DIM, BLOCK_DV, TILE)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups"])
def rewrite_kernel(
    q,
    k,
    v,
    dout,
    statistics,
    q_parts,
    k_parts,
    v_parts,
    dout_parts,
    q_sizes,
    kv_sizes,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    q_part_strides,
    k_part_strides,
    v_part_strides,
    dout_part_strides,
    distances,
    groups,
    group,
    q_len,
    k_len,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
):
    """Grid: (tiles of the tensor that has most, tensors), or (groups, tensors) with WHOLE_GROUPS.

    ``dout`` is None in the forward. A group's statistics come from `measure_kernel`, or are written with WHOLE_GROUPS.
    """
    which = tl.program_id(1)
    own = statistics + 2 * which * groups
    if which == 0:
        rewrite(
            q, own, q_parts, q_sizes, q_strides, q_part_strides, distances[0], groups, group, q_len,
            HEAD_DIM, BLOCK_D, TILE, WHOLE_GROUPS,
        )  # fmt: skip
    elif which == 1:
        rewrite(
            k, own, k_parts, kv_sizes, k_strides, k_part_strides, distances[1], groups, 1, k_len,
            HEAD_DIM, BLOCK_D, TILE, WHOLE_GROUPS,
        )  # fmt: skip
    elif which == 2:
        rewrite(
            v, own, v_parts, kv_sizes, v_strides, v_part_strides, distances[2], groups, 1, k_len,
            V_HEAD_DIM, BLOCK_DV, TILE, WHOLE_GROUPS,
        )  # fmt: skip
    elif dout is not None:
        rewrite(
            dout, own, dout_parts, q_sizes, dout_strides, dout_part_strides, distances[3], groups, group, q_len,
            V_HEAD_DIM, BLOCK_DV, TILE, WHOLE_GROUPS,
        )  # fmt: skip
