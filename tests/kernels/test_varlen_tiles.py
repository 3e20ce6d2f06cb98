"""Every row of packed sequences is in one tile, of its own sequence."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.kernels.lib.reductions import locate_rows
from cs336_systems.kernels.lib.varlen import sequence_of, slot_of, span_of
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import starts_of


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
