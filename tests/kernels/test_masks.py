"""The ranges of tiles that kernels visit are those of the band, wherever its edges lie."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from cs336_systems.kernels.triton.lib.masks import key_ranges, query_ranges, visible
from cs336_systems.kernels.versions import compile_options

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
