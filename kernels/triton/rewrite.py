"""Rewriting float32 inputs as the float16 parts that `operands` describes: one launch if they are short, else two."""

import triton
import triton.language as tl

from .addresses import load_tile, matrix, store_tile
from .operands import part_of
from .sequences import whole
from .units import NORM_UNIT, TOP, exponent_of, power_of_two


@triton.jit
def tile_statistics(tile, NORM: tl.constexpr):
    """A tile's largest finite magnitude, and with NORM the largest norm of what is finite in a row, by 2**NORM_UNIT."""
    magnitude = tl.abs(tile)
    # Infinities and NaN spoil the rows they stand in, as they must, but not the unit of all the others.
    magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.max(tl.max(magnitude, 1), 0)
    norm = largest
    if NORM:
        # The largest element becomes about 1: squares do not overflow, and those that vanish are of no consequence.
        exponent = exponent_of(largest)
        relative = magnitude * power_of_two(-exponent)
        norm = tl.sqrt(tl.max(tl.sum(relative * relative, 1), 0)) * power_of_two(exponent - NORM_UNIT)
    return largest, norm


@triton.jit
def store_statistics(target, largest, norm, NORM: tl.constexpr):
    """Write a largest magnitude, and with NORM a largest norm beside it."""
    tl.store(target, largest)
    if NORM:
        tl.store(target + 1, norm)


@triton.jit
def write_parts(target, first_row, tile, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of rows as float16 parts, in the unit of a group whose largest magnitude is ``largest``."""
    tile = tile * power_of_two(-exponent_of(largest) + TOP)
    high = tile.to(tl.float16)
    store_tile(target, high, first_row, TILE, BLOCK, WIDTH)
    if len(target.parts) == 1:
        store_tile(part_of(target, target.parts[0]), tile - high.to(tl.float32), first_row, TILE, BLOCK, WIDTH)


@triton.jit
def group_statistics(
    x,
    sizes,
    strides,
    index,
    group,
    rows,
    share,
    shares,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
):
    """The largest magnitude in one share of a group's tiles, and with NORM the largest norm of a row."""
    tiles = tl.cdiv(rows, TILE)
    largest = tl.zeros([], tl.float32)
    norm = tl.zeros([], tl.float32)
    for number in range(share, group * tiles, shares):
        source = matrix(x, index * group + number // tiles, sizes, strides, whole(rows), (), UNIT)
        of_tile, norm_of_tile = tile_statistics(
            load_tile(source, number % tiles * TILE, TILE, BLOCK, WIDTH, True), NORM
        )
        largest = tl.maximum(largest, of_tile)
        norm = tl.maximum(norm, norm_of_tile)
    return largest, norm


@triton.jit
def measure(
    x,
    partials,
    sizes,
    strides,
    group,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    NORM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Write the statistics of one of SLOTS shares of a group."""
    index = tl.program_id(0) // SLOTS
    slot = tl.program_id(0) % SLOTS
    largest, norm = group_statistics(x, sizes, strides, index, group, rows, slot, SLOTS, WIDTH, BLOCK, TILE, UNIT, NORM)
    store_statistics(partials + 2 * tl.program_id(0), largest, norm, NORM)


@triton.jit
def gathered(partials, statistics, writes, NORM: tl.constexpr, SLOTS: tl.constexpr):
    """A group's largest magnitude, from what `measure` wrote; one program writes the group's statistics."""
    slots = 2 * tl.arange(0, SLOTS)
    largest = tl.max(tl.load(partials + slots), 0)
    if writes:
        tl.store(statistics, largest)
        if NORM:
            tl.store(statistics + 1, tl.max(tl.load(partials + slots + 1), 0))
    return largest


@triton.jit
def rewrite(
    x,
    statistics,
    partials,
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
    SLOTS: tl.constexpr,
):
    """Rewrite one tile of a measured group; else measure the whole group and rewrite one share of its tiles.

    The strides of parts are multiples of 16, which needs no unit.
    """
    tiles = tl.cdiv(rows, TILE)
    if SLOTS:
        index = tl.program_id(0) // tiles
        if index < groups * group:
            number = index // group
            first_row = tl.program_id(0) % tiles * TILE
            writes = (first_row == 0) & (index % group == 0)
            largest = gathered(partials + 2 * SLOTS * number, statistics + 2 * number, writes, NORM, SLOTS)
            tile = load_tile(
                matrix(x, index, sizes, strides, whole(rows), (), UNIT), first_row, TILE, BLOCK, WIDTH, True
            )
            target = matrix(parts, index, sizes, part_strides, whole(rows), distances, 1)
            write_parts(target, first_row, tile, largest, WIDTH, BLOCK, TILE)
    else:
        index = tl.program_id(0) // shares
        share = tl.program_id(0) % shares
        largest, norm = group_statistics(x, sizes, strides, index, group, rows, 0, 1, WIDTH, BLOCK, TILE, UNIT, NORM)
        if share == 0:
            store_statistics(statistics + 2 * index, largest, norm, NORM)
        for number in range(share, group * tiles, shares):
            member = index * group + number // tiles
            first_row = number % tiles * TILE
            tile = load_tile(
                matrix(x, member, sizes, strides, whole(rows), (), UNIT), first_row, TILE, BLOCK, WIDTH, True
            )
            target = matrix(parts, member, sizes, part_strides, whole(rows), distances, 1)
            write_parts(target, first_row, tile, largest, WIDTH, BLOCK, TILE)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups"])
def measure_kernel(
    q,
    k,
    v,
    dout,
    partials,
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
    SLOTS: tl.constexpr,
):
    """Grid: (groups * SLOTS, tensors). ``partials`` is (tensors, groups, SLOTS, 2)."""
    which = tl.program_id(1)
    own = partials + 2 * SLOTS * which * groups
    if which == 0:
        measure(q, own, q_sizes, q_strides, group, q_len, HEAD_DIM, BLOCK_D, TILE, UNITS[0], False, SLOTS)
    elif which == 1:
        measure(k, own, kv_sizes, k_strides, 1, k_len, HEAD_DIM, BLOCK_D, TILE, UNITS[1], False, SLOTS)
    elif which == 2:
        measure(v, own, kv_sizes, v_strides, 1, k_len, V_HEAD_DIM, BLOCK_DV, TILE, UNITS[2], dout is not None, SLOTS)
    elif dout is not None:
        measure(dout, own, q_sizes, dout_strides, group, q_len, V_HEAD_DIM, BLOCK_DV, TILE, UNITS[3], True, SLOTS)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups", "shares"])
def rewrite_kernel(
    q,
    k,
    v,
    dout,
    statistics,
    partials,
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
    SLOTS: tl.constexpr,
):
    """Grid: (tiles of the tensor that has most, tensors) with SLOTS, else (groups * shares, tensors).

    ``dout`` is None in the forward. SLOTS says that ``partials`` come from `measure_kernel`; ``statistics`` (tensors,
    groups, 2) are made of them. If it is 0, every program measures its whole group, the first of the group's ``shares``
    programs writes the statistics, and all of them divide the rewriting among themselves: reading a group of a short
    input again costs less than a launch.
    """
    which = tl.program_id(1)
    own = statistics + 2 * which * groups
    if SLOTS:
        partials += 2 * SLOTS * which * groups
    if which == 0:
        rewrite(
            q, own, partials, q_parts, q_sizes, q_strides, q_part_strides, distances[0], groups, group, q_len, shares,
            HEAD_DIM, BLOCK_D, TILE, UNITS[0], False, SLOTS,
        )  # fmt: skip
    elif which == 1:
        rewrite(
            k, own, partials, k_parts, kv_sizes, k_strides, k_part_strides, distances[1], groups, 1, k_len, shares,
            HEAD_DIM, BLOCK_D, TILE, UNITS[1], False, SLOTS,
        )  # fmt: skip
    elif which == 2:
        rewrite(
            v, own, partials, v_parts, kv_sizes, v_strides, v_part_strides, distances[2], groups, 1, k_len, shares,
            V_HEAD_DIM, BLOCK_DV, TILE, UNITS[2], dout is not None, SLOTS,
        )  # fmt: skip
    elif dout is not None:
        rewrite(
            dout, own, partials, dout_parts, q_sizes, dout_strides, dout_part_strides, distances[3], groups, group,
            q_len, shares, V_HEAD_DIM, BLOCK_DV, TILE, UNITS[3], True, SLOTS,
        )  # fmt: skip
