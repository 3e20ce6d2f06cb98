"""The ranges of tiles that kernels visit are exactly those that the mask asks for, wherever the diagonal lies."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from cs336_systems.kernels.portable.masks import key_range, query_range, visible

TILES = 3
LENGTHS = (1, 16, 41)
DIAGONALS = range(-20, 21)


@triton.jit(do_not_specialize=["k_len", "diagonal"])
def key_range_kernel(ranges, k_len, diagonal, ROWS: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr):
    whole, edge, end = key_range(tl.program_id(0) * ROWS, k_len, diagonal, ROWS, TILE_K, CAUSAL)
    tl.store(ranges + 3 * tl.program_id(0), whole)
    tl.store(ranges + 3 * tl.program_id(0) + 1, edge)
    tl.store(ranges + 3 * tl.program_id(0) + 2, end)


@triton.jit(do_not_specialize=["q_len", "diagonal"])
def query_range_kernel(ranges, q_len, diagonal, COLUMNS: tl.constexpr, TILE_Q: tl.constexpr, CAUSAL: tl.constexpr):
    start, whole = query_range(tl.program_id(0) * COLUMNS, q_len, diagonal, COLUMNS, TILE_Q, CAUSAL)
    tl.store(ranges + 2 * tl.program_id(0), start)
    tl.store(ranges + 2 * tl.program_id(0) + 1, whole)


@triton.jit(do_not_specialize=["k_len", "diagonal"])
def visible_kernel(seen, k_len, diagonal, SIZE: tl.constexpr, CAUSAL: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None]
    columns = tl.arange(0, SIZE)[None, :]
    tl.store(seen + rows * SIZE + columns, visible(rows, columns, k_len, diagonal, CAUSAL).to(tl.int32))


def sees(row, column, k_len, diagonal, causal):
    return column < k_len and (not causal or column <= row + diagonal)


def ranges_of(kernel, device, *arguments, numbers=2):
    ranges = torch.full((TILES, numbers), -1, dtype=torch.int32, device=device)
    kernel[(TILES,)](ranges, *arguments)
    return ranges.tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_visible_is_the_mask(flash_device, causal):
    for diagonal in (-3, 0, 5):
        seen = torch.empty(16, 16, dtype=torch.int32, device=flash_device)
        visible_kernel[(1,)](seen, 13, diagonal, 16, causal)
        expected = [[sees(row, column, 13, diagonal, causal) for column in range(16)] for row in range(16)]
        assert seen.bool().tolist() == expected


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_keys_of_a_tile_of_queries(flash_device, tile_q, tile_k, causal):
    for k_len in LENGTHS:
        for diagonal in DIAGONALS if causal else [0]:
            ranges = ranges_of(key_range_kernel, flash_device, k_len, diagonal, tile_q, tile_k, causal, numbers=3)
            for tile, (whole, edge, end) in enumerate(ranges):
                first, last = tile * tile_q, (tile + 1) * tile_q - 1
                seen_by_all = sum(sees(first, column, k_len, diagonal, causal) for column in range(k_len))
                seen_by_any = sum(sees(last, column, k_len, diagonal, causal) for column in range(k_len))
                assert whole == edge
                assert (whole, end) == (seen_by_all // tile_k * tile_k, seen_by_any), (k_len, diagonal, tile)


@pytest.mark.parametrize(("tile_q", "tile_k"), [(16, 16), (32, 16), (16, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_a_tile_of_keys(flash_device, tile_q, tile_k, causal):
    """Of the last tile's columns some may not exist; which rows would see them is asked all the same."""
    for q_len in LENGTHS:
        for diagonal in DIAGONALS if causal else [0]:
            ranges = ranges_of(query_range_kernel, flash_device, q_len, diagonal, tile_k, tile_q, causal)
            for tile, (start, whole) in enumerate(ranges):
                first, last = tile * tile_k, (tile + 1) * tile_k - 1
                key = (q_len, diagonal, tile)
                sighted = [row for row in range(q_len) if sees(row, first, last + 1, diagonal, causal)]
                see_all = [row for row in range(q_len) if sees(row, last, last + 1, diagonal, causal)]
                assert start % tile_q == 0, key
                assert whole % tile_q == 0, key
                if sighted:
                    assert start == sighted[0] // tile_q * tile_q, key
                else:
                    assert start + tile_q > q_len, key
                masked = see_all[0] if see_all else q_len
                assert whole == -(-masked // tile_q) * tile_q, key
