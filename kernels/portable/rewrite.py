"""Rewriting float32 inputs as the float16 parts that `operands` describes: one launch if they are short, else two."""

import triton
import triton.language as tl

from .addresses import load_tile, matrix, store_tile
from .operands import part_of
from .units import TOP, exponent_of, power_of_two


@triton.jit
def tile_statistics(tile, NORM: tl.constexpr):
    """A tile's largest finite magnitude, and with NORM the largest norm of what is finite in a row."""
    magnitude = tl.abs(tile)
    # Infinities and NaN spoil the rows they stand in, as they must, but not the unit of all the others.
    magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.max(tl.max(magnitude, 1), 0)
    norm = largest
    if NORM:
        # The largest element becomes about 1: squares do not overflow, and those that vanish are of no consequence.
        exponent = exponent_of(largest)
        relative = magnitude * power_of_two(-exponent)
        norm = tl.sqrt(tl.max(tl.sum(relative * relative, 1), 0)) * power_of_two(exponent)
    return largest, norm


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
    x,
    statistics,
    sizes,
    strides,
    groups,
    group,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
):
    """Take one tile of rows into its group's statistics."""
    tiles = tl.cdiv(rows, TILE)
    index = tl.program_id(0) // tiles
    if index < groups * group:
        source = matrix(x, index, sizes, strides, rows, (), UNIT)
        tile = load_tile(source, tl.program_id(0) % tiles * TILE, TILE, BLOCK, WIDTH, True)
        largest, norm = tile_statistics(tile, NORM)
        # Non-negative floats are ordered as their bits are, and a maximum is the same in whatever order it is taken.
        target = (statistics + 2 * (index // group)).to(tl.pointer_type(tl.int32))
        tl.atomic_max(target, largest.to(tl.int32, bitcast=True), sem="relaxed")
        if NORM:
            tl.atomic_max(target + 1, norm.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def group_statistics(
    x,
    sizes,
    strides,
    index,
    group,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
):
    """The largest magnitude of a whole group, and with NORM the largest norm of a row."""
    largest = tl.zeros([], tl.float32)
    norm = tl.zeros([], tl.float32)
    for member in range(group):
        source = matrix(x, index * group + member, sizes, strides, rows, (), UNIT)
        for first_row in range(0, rows, TILE):
            of_tile, norm_of_tile = tile_statistics(load_tile(source, first_row, TILE, BLOCK, WIDTH, True), NORM)
            largest = tl.maximum(largest, of_tile)
            norm = tl.maximum(norm, norm_of_tile)
    return largest, norm


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
    shares,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
    MEASURED: tl.constexpr,
):
    """Rewrite one tile of a measured group; else measure the whole group and rewrite one share of its tiles.

    The strides of parts are multiples of 16, which needs no unit.
    """
    tiles = tl.cdiv(rows, TILE)
    if MEASURED:
        index = tl.program_id(0) // tiles
        if index < groups * group:
            first_row = tl.program_id(0) % tiles * TILE
            tile = load_tile(matrix(x, index, sizes, strides, rows, (), UNIT), first_row, TILE, BLOCK, WIDTH, True)
            target = matrix(parts, index, sizes, part_strides, rows, distances, 1)
            write_parts(target, first_row, tile, tl.load(statistics + 2 * (index // group)), WIDTH, BLOCK, TILE)
    else:
        index = tl.program_id(0) // shares
        share = tl.program_id(0) % shares
        largest, norm = group_statistics(x, sizes, strides, index, group, rows, WIDTH, BLOCK, TILE, UNIT, NORM)
        if share == 0:
            tl.store(statistics + 2 * index, largest)
            if NORM:
                tl.store(statistics + 2 * index + 1, norm)
        for number in range(share, group * tiles, shares):
            member = index * group + number // tiles
            first_row = number % tiles * TILE
            tile = load_tile(matrix(x, member, sizes, strides, rows, (), UNIT), first_row, TILE, BLOCK, WIDTH, True)
            target = matrix(parts, member, sizes, part_strides, rows, distances, 1)
            write_parts(target, first_row, tile, largest, WIDTH, BLOCK, TILE)


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
    UNITS: tl.constexpr,
):
    """Grid: (tiles of the tensor that has most, tensors). ``statistics`` (tensors, groups, 2) starts at 0."""
    which = tl.program_id(1)
    own = statistics + 2 * which * groups
    if which == 0:
        measure(q, own, q_sizes, q_strides, groups, group, q_len, HEAD_DIM, BLOCK_D, TILE, UNITS[0], False)
    elif which == 1:
        measure(k, own, kv_sizes, k_strides, groups, 1, k_len, HEAD_DIM, BLOCK_D, TILE, UNITS[1], False)
    elif which == 2:
        measure(v, own, kv_sizes, v_strides, groups, 1, k_len, V_HEAD_DIM, BLOCK_DV, TILE, UNITS[2], dout is not None)
    elif dout is not None:
        measure(dout, own, q_sizes, dout_strides, groups, group, q_len, V_HEAD_DIM, BLOCK_DV, TILE, UNITS[3], True)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups", "shares"])
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
    shares,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TILE: tl.constexpr,
    UNITS: tl.constexpr,
    MEASURED: tl.constexpr,
):
    """Grid: (tiles of the tensor that has most, tensors) with MEASURED, else (groups * shares, tensors).

    ``dout`` is None in the forward. MEASURED says that ``statistics`` come from `measure_kernel`. If not, every program
    measures its whole group, the first of the group's ``shares`` programs writes the statistics, and all of them divide
    the rewriting among themselves: reading a group of a short input again costs less than a launch.
    """
    which = tl.program_id(1)
    own = statistics + 2 * which * groups
    if which == 0:
        rewrite(
            q, own, q_parts, q_sizes, q_strides, q_part_strides, distances[0], groups, group, q_len, shares,
            HEAD_DIM, BLOCK_D, TILE, UNITS[0], False, MEASURED,
        )  # fmt: skip
    elif which == 1:
        rewrite(
            k, own, k_parts, kv_sizes, k_strides, k_part_strides, distances[1], groups, 1, k_len, shares,
            HEAD_DIM, BLOCK_D, TILE, UNITS[1], False, MEASURED,
        )  # fmt: skip
    elif which == 2:
        rewrite(
            v, own, v_parts, kv_sizes, v_strides, v_part_strides, distances[2], groups, 1, k_len, shares,
            V_HEAD_DIM, BLOCK_DV, TILE, UNITS[2], dout is not None, MEASURED,
        )  # fmt: skip
    elif dout is not None:
        rewrite(
            dout, own, dout_parts, q_sizes, dout_strides, dout_part_strides, distances[3], groups, group, q_len, shares,
            V_HEAD_DIM, BLOCK_DV, TILE, UNITS[3], True, MEASURED,
        )  # fmt: skip
