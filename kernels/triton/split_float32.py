"""Kernels that split float32 inputs into float16 halves: high + low, scaled by a power of two per group (`lib.pow2`).

Short groups take one launch, in which every program measures its whole group. Others are measured in a launch before.
``C`` holds the compile-time sizes, see `problem.Constants`; a tile has TILE_Q rows.
"""

import triton
import triton.language as tl

from .lib.matrix import load_tile, low_half, matrix, store_tile
from .lib.pow2 import NORM_SHIFT, TOP, exponent_of, power_of_two
from .lib.varlen import all_rows


@triton.jit
def tile_stats(tile, NORM: tl.constexpr):
    """A tile's largest finite magnitude, and with NORM the largest norm of its rows, divided by 2**NORM_SHIFT."""
    magnitude = tl.abs(tile)
    # Infinities and NaN spoil their rows, as they must, but not the scale of the group.
    magnitude = tl.where(magnitude < float("inf"), magnitude, 0.0)
    largest = tl.max(tl.max(magnitude, 1), 0)
    norm = largest
    if NORM:
        # Scaled so that the largest element is about 1: squares do not overflow, and those that vanish do not matter.
        exponent = exponent_of(largest)
        relative = magnitude * power_of_two(-exponent)
        norm = tl.sqrt(tl.max(tl.sum(relative * relative, 1), 0)) * power_of_two(exponent - NORM_SHIFT)
    return largest, norm


@triton.jit
def store_stats(target, largest, norm, NORM: tl.constexpr):
    """Store a largest magnitude, and with NORM a largest norm after it."""
    tl.store(target, largest)
    if NORM:
        tl.store(target + 1, norm)


@triton.jit
def store_halves(target, first_row, tile, largest, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Store a tile as float16 halves, scaled for a group whose largest magnitude is ``largest``."""
    tile = tile * power_of_two(-exponent_of(largest) + TOP)
    high = tile.to(tl.float16)
    store_tile(target, high, first_row, TILE, BLOCK, WIDTH)
    if len(target.lo) == 1:
        store_tile(low_half(target), tile - high.to(tl.float32), first_row, TILE, BLOCK, WIDTH)


@triton.jit
def group_stats(
    x, sizes, strides, index, group, rows, share, shares, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STRIDE_MULTIPLE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The stats of every ``shares``-th tile of a group, from tile ``share`` on."""
    tiles = tl.cdiv(rows, TILE)
    largest = tl.zeros([], tl.float32)
    norm = tl.zeros([], tl.float32)
    for number in range(share, group * tiles, shares):
        source = matrix(x, index * group + number // tiles, sizes, strides, all_rows(rows), (), STRIDE_MULTIPLE)
        tile_largest, tile_norm = tile_stats(load_tile(source, number % tiles * TILE, TILE, BLOCK, WIDTH, True), NORM)
        largest = tl.maximum(largest, tile_largest)
        norm = tl.maximum(norm, tile_norm)
    return largest, norm


@triton.jit
def measure(
    x, partials, sizes, strides, group, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    STRIDE_MULTIPLE: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Store the stats of one of SLOTS shares of a group."""
    index = tl.program_id(0) // SLOTS
    slot = tl.program_id(0) % SLOTS
    largest, norm = group_stats(
        x, sizes, strides, index, group, rows, slot, SLOTS, WIDTH, BLOCK, TILE, STRIDE_MULTIPLE, NORM
    )  # fmt: skip
    store_stats(partials + 2 * tl.program_id(0), largest, norm, NORM)


@triton.jit
def reduce_partials(partials, stats, writes, NORM: tl.constexpr, SLOTS: tl.constexpr):
    """A group's largest magnitude from what `measure` stored; one program stores the group's stats."""
    slots = 2 * tl.arange(0, SLOTS)
    largest = tl.max(tl.load(partials + slots), 0)
    if writes:
        tl.store(stats, largest)
        if NORM:
            tl.store(stats + 1, tl.max(tl.load(partials + slots + 1), 0))
    return largest


@triton.jit
def split_tensor(
    x, stats, partials, halves, sizes, strides, half_strides, lo_offset, groups, group, rows, shares,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, STRIDE_MULTIPLE: tl.constexpr, NORM: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Split one tile of a measured group; without SLOTS measure the whole group and split every ``shares``-th tile.

    The strides of the halves are multiples of 16.
    """
    tiles = tl.cdiv(rows, TILE)
    if SLOTS:
        index = tl.program_id(0) // tiles
        if index < groups * group:
            number = index // group
            first_row = tl.program_id(0) % tiles * TILE
            writes = (first_row == 0) & (index % group == 0)
            largest = reduce_partials(partials + 2 * SLOTS * number, stats + 2 * number, writes, NORM, SLOTS)
            source = matrix(x, index, sizes, strides, all_rows(rows), (), STRIDE_MULTIPLE)
            tile = load_tile(source, first_row, TILE, BLOCK, WIDTH, True)
            target = matrix(halves, index, sizes, half_strides, all_rows(rows), lo_offset, 1)
            store_halves(target, first_row, tile, largest, WIDTH, BLOCK, TILE)
    else:
        index = tl.program_id(0) // shares
        share = tl.program_id(0) % shares
        largest, norm = group_stats(
            x, sizes, strides, index, group, rows, 0, 1, WIDTH, BLOCK, TILE, STRIDE_MULTIPLE, NORM
        )  # fmt: skip
        if share == 0:
            store_stats(stats + 2 * index, largest, norm, NORM)
        for number in range(share, group * tiles, shares):
            member = index * group + number // tiles
            first_row = number % tiles * TILE
            source = matrix(x, member, sizes, strides, all_rows(rows), (), STRIDE_MULTIPLE)
            tile = load_tile(source, first_row, TILE, BLOCK, WIDTH, True)
            target = matrix(halves, member, sizes, half_strides, all_rows(rows), lo_offset, 1)
            store_halves(target, first_row, tile, largest, WIDTH, BLOCK, TILE)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups"])
def measure_kernel(
    q, k, v, dout, partials, q_sizes, kv_sizes, q_strides, k_strides, v_strides, dout_strides,
    groups, group, q_len, k_len, C: tl.constexpr, STRIDE_MULTIPLES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * SLOTS, tensors). ``partials`` is (tensors, groups, SLOTS, 2)."""
    which = tl.program_id(1)
    target = partials + 2 * SLOTS * which * groups
    D: tl.constexpr = C.HEAD_DIM
    DV: tl.constexpr = C.V_HEAD_DIM
    HAS_DOUT: tl.constexpr = dout is not None
    M: tl.constexpr = STRIDE_MULTIPLES
    if which == 0:
        measure(q, target, q_sizes, q_strides, group, q_len, D, C.BLOCK_D, C.TILE_Q, M[0], False, SLOTS)
    elif which == 1:
        measure(k, target, kv_sizes, k_strides, 1, k_len, D, C.BLOCK_D, C.TILE_Q, M[1], False, SLOTS)
    elif v is not None:
        if which == 2:
            measure(v, target, kv_sizes, v_strides, 1, k_len, DV, C.BLOCK_DV, C.TILE_Q, M[2], HAS_DOUT, SLOTS)
        elif dout is not None:
            measure(dout, target, q_sizes, dout_strides, group, q_len, DV, C.BLOCK_DV, C.TILE_Q, M[3], True, SLOTS)


@triton.jit(do_not_specialize=["q_len", "k_len", "groups", "shares"])
def split_kernel(
    q, k, v, dout, stats, partials, q_halves, k_halves, v_halves, dout_halves,
    q_sizes, kv_sizes, q_strides, k_strides, v_strides, dout_strides,
    q_half_strides, k_half_strides, v_half_strides, dout_half_strides, lo_offsets,
    groups, group, q_len, k_len, shares, C: tl.constexpr, STRIDE_MULTIPLES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of the tensor that has most, tensors) with SLOTS, otherwise (groups * shares, tensors).

    ``dout`` is None in the forward, and ``v`` too if only q and k are split. ``stats`` is (tensors, groups, 2). With
    SLOTS they are reduced from ``partials`` (`measure_kernel`). Without, every program measures its whole group, and
    the ``shares`` programs of a group divide its tiles among them: reading a short group again costs less than a
    launch.
    """
    which = tl.program_id(1)
    target = stats + 2 * which * groups
    if SLOTS:
        partials += 2 * SLOTS * which * groups
    if which == 0:
        split_tensor(
            q, target, partials, q_halves, q_sizes, q_strides, q_half_strides, lo_offsets[0], groups, group, q_len,
            shares, C.HEAD_DIM, C.BLOCK_D, C.TILE_Q, STRIDE_MULTIPLES[0], False, SLOTS,
        )  # fmt: skip
    elif which == 1:
        split_tensor(
            k, target, partials, k_halves, kv_sizes, k_strides, k_half_strides, lo_offsets[1], groups, 1, k_len, shares,
            C.HEAD_DIM, C.BLOCK_D, C.TILE_Q, STRIDE_MULTIPLES[1], False, SLOTS,
        )  # fmt: skip
    elif v is not None:
        if which == 2:
            split_tensor(
                v, target, partials, v_halves, kv_sizes, v_strides, v_half_strides, lo_offsets[2], groups, 1, k_len,
                shares, C.V_HEAD_DIM, C.BLOCK_DV, C.TILE_Q, STRIDE_MULTIPLES[2], dout is not None, SLOTS,
            )  # fmt: skip
        elif dout is not None:
            split_tensor(
                dout, target, partials, dout_halves, q_sizes, dout_strides, dout_half_strides, lo_offsets[3], groups,
                group, q_len, shares, C.V_HEAD_DIM, C.BLOCK_DV, C.TILE_Q, STRIDE_MULTIPLES[3], True, SLOTS,
            )  # fmt: skip
