"""Where tiles of packed sequences lie, for kernels of both kinds: every row is in one tile, of its own sequence."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.kernels.sm90.launches import tiles_per_head
from cs336_systems.kernels.triton.sequences import sequence_of, slot_of, span_of
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import starts_of


@triton.jit
def places_kernel(starts, sequences, length, places, TILE: tl.constexpr):
    """Grid: a program for each tile; writes its sequence, and from which row of the matrix to which it lies."""
    tile = tl.program_id(0)
    sequence = sequence_of(starts, tile, sequences, TILE)
    span = span_of(starts, sequence, sequences, length)
    first = (tile - slot_of(starts, sequence, TILE)) * TILE
    last = tl.minimum(first + TILE, span.length)
    tl.store(places + 3 * tile, sequence)
    tl.store(places + 3 * tile + 1, span.first + first)
    tl.store(places + 3 * tile + 2, span.first + tl.maximum(last, first))


@pytest.mark.parametrize("tile", [64, 128, 192])
@settings(max_examples=8)
@given(
    lengths=st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 400]), min_size=1, max_size=9),
    beyond=st.sampled_from([0, 1, 64, 300]),
)
def test_every_row_is_in_one_tile(flash_device, tile, lengths, beyond):
    starts = starts_of(lengths, flash_device)
    rows = sum(lengths) + beyond
    tiles = tiles_per_head(rows, tile, len(lengths))
    places = torch.zeros(tiles, 3, dtype=torch.int32, device=flash_device)
    places_kernel[(tiles,)](starts, len(lengths), rows, places, tile, **compile_options())
    expected = [number for number, length in enumerate([*lengths, beyond]) for _ in range(length)]
    found = [-1] * rows
    for sequence, first, stop in places.tolist():
        for row in range(first, stop):
            assert found[row] == -1
            found[row] = sequence
    assert found == expected
