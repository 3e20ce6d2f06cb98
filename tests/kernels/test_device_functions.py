"""Device functions by themselves: which tiles are visited, of which sequence they are, and where elements lie."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.kernels.language import floor_divide, remainder
from cs336_systems.kernels.lib.reductions import locate_rows
from cs336_systems.kernels.lib.varlen import Span, sequence_of, slot_of, span_of
from cs336_systems.kernels.triton.lib.masks import key_ranges, query_ranges, visible
from cs336_systems.kernels.triton.lib.matrix import matrix, tile_pointers
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import starts_of

TILES = 3
LENGTHS = (1, 16, 41)
AROUND = range(-20, 21)
EDGES: dict[str, list[tuple[int | None, int | None]]] = {
    "no_band": [(None, None)],
    "right": [(None, right) for right in AROUND],
    "left": [(left, None) for left in AROUND],
    "both": [(right - width, right) for right in AROUND[::5] for width in (0, 5, 17, 30)],
}


@triton.jit
def store_ranges(target, ranges):
    for number in tl.static_range(3):
        tl.store(target + 6 * tl.program_id(0) + 2 * number, ranges[number][0])
        tl.store(target + 6 * tl.program_id(0) + 2 * number + 1, ranges[number][1])


@triton.jit(do_not_specialize=["k_len", "left", "right"])
def key_ranges_kernel(
    target, k_len, left, right, ROWS: tl.constexpr, TILE_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    store_ranges(target, key_ranges(tl.program_id(0) * ROWS, k_len, left, right, ROWS, TILE_K, LEFT, RIGHT))


@triton.jit(do_not_specialize=["q_len", "left", "right"])
def query_ranges_kernel(
    target, q_len, left, right, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    store_ranges(target, query_ranges(tl.program_id(0) * COLUMNS, q_len, left, right, COLUMNS, TILE_Q, LEFT, RIGHT))


@triton.jit(do_not_specialize=["k_len", "left", "right"])
def visible_kernel(seen, k_len, left, right, SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    tl.store(seen + rows * SIZE + columns, visible(rows, columns, k_len, left, right, LEFT, RIGHT).to(tl.int32))


def sees(row, column, left, right):
    return (left is None or column >= row + left) and (right is None or column <= row + right)


def check_ranges(ranges, step, length, seen_by_any, seen_by_all, key):
    """Each tile with visible pairs is visited once, and all pairs of the second range are visible."""
    visited = [[*range(start, stop, step)] for start, stop in ranges]
    flat = [start for part in visited for start in part]
    assert len(flat) == len(set(flat)), key
    assert all(start % step == 0 and 0 <= start < length for start in flat), key
    needed = {place // step * step for place in seen_by_any}
    assert needed <= set(flat), key
    # At most one tile at each end is visited without need.
    assert len(flat) <= len(needed) + 2, key
    for start in visited[1]:
        assert all(place in seen_by_all for place in range(start, min(start + step, length))), key
    whole = [start for start in flat if all(place in seen_by_all for place in range(start, start + step))]
    assert set(whole) <= set(visited[1]), key


@pytest.mark.parametrize("edges", EDGES)
def test_visible_is_the_band(flash_device, edges):
    for left, right in EDGES[edges][::7]:
        seen = torch.empty(16, 16, dtype=torch.int32, device=flash_device)
        visible_kernel[(1,)](
            seen, 13, left or 0, right or 0, 16, left is not None, right is not None, **compile_options()
        )
        expected = [[column < 13 and sees(row, column, left, right) for column in range(16)] for row in range(16)]
        assert seen.bool().tolist() == expected


@pytest.mark.parametrize("kernel", [key_ranges_kernel, query_ranges_kernel], ids=["keys", "queries"])
@pytest.mark.parametrize(("tile", "step"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("edges", EDGES)
def test_ranges_are_those_of_the_band(flash_device, edges, tile, step, kernel):
    """Keys of a tile of queries, and queries of a tile of keys, whose last columns may not exist."""
    of_keys = kernel is key_ranges_kernel
    bands = EDGES[edges] if tile == step else EDGES[edges][::3]
    for length, (left, right) in itertools.product(LENGTHS, bands):
        target = torch.full((TILES, 3, 2), -1, dtype=torch.int32, device=flash_device)
        has_edges = left is not None, right is not None
        kernel[(TILES,)](target, length, left or 0, right or 0, tile, step, *has_edges, **compile_options())
        for number, ranges in enumerate(target.tolist()):
            own = range(number * tile, (number + 1) * tile)
            by_pair = [
                [sees(x, place, left, right) if of_keys else sees(place, x, left, right) for x in own]
                for place in range(length)
            ]
            by_any, by_all = ({place for place in range(length) if test(by_pair[place])} for test in (any, all))
            key = length, left, right, number
            check_ranges(ranges, step, length, by_any, by_all, key)
            if of_keys:  # the second range leaves rows of keys unchecked: they all have to exist
                assert ranges[1][1] <= max(length // step * step, ranges[1][0]), key


ROWS = COLUMNS = 16
FAR = 2**30 + 24  # fits 32 bits; twice this does not


@triton.jit(do_not_specialize=["index", "first", "first_row"])
def distances_kernel(
    pointer,
    distances,
    index,
    sizes,
    strides,
    first,
    first_row,
    STRIDE_MULTIPLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Bytes from the tensor's first element to each element of a tile."""
    source = matrix(pointer, index, sizes, strides, Span(first, 0), (), STRIDE_MULTIPLE)
    pointers = tile_pointers(source, first_row, ROWS, COLUMNS)
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(distances + offsets, pointers.to(tl.int64) - pointer.to(tl.int64))


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        pytest.param((7,), (96, 32, 2), id="near"),
        pytest.param((7,), (FAR, 32, 1), id="batch"),
        pytest.param((2, 4), (96, FAR, 32, 1), id="heads"),
        pytest.param((2, 2, 2), (FAR, 640, 96, 32, 1), id="first_of_three_axes"),
        pytest.param((7,), (96, FAR, 1), id="rows"),
        pytest.param((7,), (96, 1, FAR), id="columns"),
        pytest.param((7,), (2**33, 2**32, 2**31), id="strides_beyond_32_bits"),
        pytest.param((2, 4), (0, 96, 32, 1), id="expanded"),
    ],
)
@pytest.mark.parametrize(("first", "first_row", "multiple"), [(0, 0, 1), (5, 48, 1), (0, 48, 8), (2**20, 0, 8)])
def test_distances_within_a_tensor(flash_device, sizes, strides, first, first_row, multiple):
    """Addresses are computed but never loaded from: no tensor need be as large."""
    x = torch.empty(1, dtype=torch.float16, device=flash_device)
    index = 6
    distances = torch.empty(ROWS, COLUMNS, dtype=torch.int64, device=flash_device)
    distances_kernel[(1,)](
        x, distances, index, (0, *sizes[1:]), strides, first, first_row, multiple, ROWS, COLUMNS, **compile_options()
    )
    where = 0
    for size, stride in zip(reversed(sizes), reversed(strides[:-2]), strict=True):
        index, position = divmod(index, size)
        where += position * stride * multiple
    rows = (first + first_row + torch.arange(ROWS))[:, None] * strides[-2] * multiple
    columns = torch.arange(COLUMNS)[None, :] * strides[-1]
    assert torch.equal(distances.cpu(), 2 * (where + rows + columns))


@triton.jit
def tiles_kernel(starts, num_seqs, length, tiles, TILE: tl.constexpr):
    """Grid: the tiles. Stores each one's sequence, and the rows of the matrix that it begins and ends with."""
    tile = tl.program_id(0)
    sequence = sequence_of(starts, tile, num_seqs, TILE)
    span = span_of(starts, sequence, num_seqs, length)
    first = (tile - slot_of(starts, sequence, TILE)) * TILE
    last = tl.minimum(first + TILE, span.length)
    tl.store(tiles + 3 * tile, sequence)
    tl.store(tiles + 3 * tile + 1, span.first + first)
    tl.store(tiles + 3 * tile + 2, span.first + tl.maximum(last, first))


@pytest.mark.parametrize("tile", [64, 128, 192])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 400]), min_size=1, max_size=9),
    after=st.sampled_from([0, 1, 64, 300]),
)
def test_every_row_is_in_one_tile(flash_device, tile, lengths, after):
    starts, rows = starts_of(lengths, flash_device), sum(lengths) + after
    count = rows // tile + len(lengths) + 1
    tiles = torch.zeros(count, 3, dtype=torch.int32, device=flash_device)
    tiles_kernel[(count,)](starts, len(lengths), rows, tiles, tile, **compile_options())
    expected = [number for number, length in enumerate([*lengths, after]) for _ in range(length)]
    found = [-1] * rows
    for sequence, first, stop in tiles.tolist():
        for row in range(first, stop):
            assert found[row] == -1
            found[row] = sequence
    assert found == expected
    sequences, positions = locate_rows(starts, torch.arange(rows, device=flash_device))
    assert sequences.tolist() == expected
    assert positions.tolist() == [row for length in (*lengths, after) for row in range(length)]


@triton.jit
def divide_kernel(x, y, quotients, remainders, CONSTANT: tl.constexpr):
    places = tl.arange(0, 64)
    divisor = tl.load(y + places) if CONSTANT is None else CONSTANT
    tl.store(quotients + places, floor_divide(tl.load(x + places), divisor))
    tl.store(remainders + places, remainder(tl.load(x + places), divisor))


@pytest.mark.parametrize("constant", [None, 1, 3, -7])
@pytest.mark.parametrize(("dtype", "of_divisor"), [*itertools.product((torch.int32, torch.int64), repeat=2)])
def test_integers_are_divided_as_by_torch(device, dtype, of_divisor, constant):
    x = torch.arange(-32, 32, dtype=dtype, device=device)
    x[:2] = torch.tensor([-(2**31) + 9, 2**31 - 1], dtype=dtype)
    y = (x % 9 + 1).to(of_divisor) * torch.where(x % 2 == 0, 1, -1).to(of_divisor)
    quotients, remainders = (torch.empty(64, dtype=torch.int64, device=device) for _ in range(2))
    divide_kernel[(1,)](x, y, quotients, remainders, constant)
    divisor = y if constant is None else constant
    assert torch.equal(quotients, (x // divisor).long())
    assert torch.equal(remainders, (x % divisor).long())
