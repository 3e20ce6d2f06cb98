"""The ranges of tiles that kernels visit are those of the band, wherever its edges lie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from cs336_systems.kernels.triton.lib.masks import key_ranges, query_ranges, visible
from cs336_systems.kernels.versions import compile_options

TILES = 3
LENGTHS = (1, 16, 41)
EDGES: dict[str, list[tuple[int | None, int | None]]] = {
    "no_band": [(None, None)],
    "right": [(None, right) for right in range(-20, 21)],
    "left": [(left, None) for left in range(-20, 21)],
    "both": [(right - width, right) for right in range(-20, 21, 3) for width in (0, 5, 17, 30)],
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


def ranges_of(kernel, device, length, band, rows, columns):
    left, right = band
    target = torch.full((TILES, 3, 2), -1, dtype=torch.int32, device=device)
    kernel[(TILES,)](
        target, length, left or 0, right or 0, rows, columns, left is not None, right is not None, **compile_options()
    )
    return target.tolist()


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


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("edges", EDGES)
def test_keys_of_a_tile_of_queries(flash_device, tile_q, tile_k, edges):
    for k_len in LENGTHS:
        for band in EDGES[edges]:
            ranges = ranges_of(key_ranges_kernel, flash_device, k_len, band, tile_q, tile_k)
            for tile, own in enumerate(ranges):
                rows = range(tile * tile_q, (tile + 1) * tile_q)
                by_any = {column for column in range(k_len) if any(sees(row, column, *band) for row in rows)}
                by_all = {column for column in by_any if all(sees(row, column, *band) for row in rows)}
                # The second range leaves rows of keys unchecked: they all have to exist.
                check_ranges(own, tile_k, k_len, by_any, by_all, (k_len, band, tile))
                assert own[1][1] <= max(k_len // tile_k * tile_k, own[1][0]), (k_len, band, tile)


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("edges", EDGES)
def test_queries_of_a_tile_of_keys(flash_device, tile_q, tile_k, edges):
    """Of the last tile's columns some may not exist; which rows would see them is asked all the same."""
    for q_len in LENGTHS:
        for band in EDGES[edges]:
            ranges = ranges_of(query_ranges_kernel, flash_device, q_len, band, tile_k, tile_q)
            for tile, own in enumerate(ranges):
                columns = range(tile * tile_k, (tile + 1) * tile_k)
                by_any = {row for row in range(q_len) if any(sees(row, column, *band) for column in columns)}
                by_all = {row for row in by_any if all(sees(row, column, *band) for column in columns)}
                check_ranges(own, tile_q, q_len, by_any, by_all, (q_len, band, tile))
