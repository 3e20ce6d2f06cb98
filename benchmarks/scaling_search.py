"""Looks for the longest sequence that fits, in as few trials as may be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.scaling_cell import Cell
from cs336_systems.training.estimate import estimate_memory

LEAST_LENGTH = 64
"""Shorter sequences are not tried."""
_USABLE = 0.95
"""Of a GPU's memory: the rest is the context's, and what fragments."""


class Found(NamedTuple):
    """The longest that fits and the shortest that does not, of those that were tried."""

    fits: int | None
    fails: int | None


def search(fits: Callable[[int], bool], first: int, most: int, bisections: int) -> Found:
    """Look for the longest that fits: by doubling or halving from the first, then between the last two.

    Raises what `fits` raises.
    """
    good, bad, length = None, None, first
    while length <= most:
        if not fits(length):
            bad = length
            break
        good, length = length, 2 * length
    while good is None and bad is not None and bad // 2 >= LEAST_LENGTH:
        if fits(bad // 2):
            good = bad // 2
        else:
            bad //= 2
    for _ in range(bisections):
        if good is None or bad is None:
            break
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad)


def first_length(cell: Cell, memory_bytes: int | None, most: int) -> int:
    """The longest doubling of the cell's length that the estimate of the training command finds room for.

    Where the memory is not known, it is the cell's own length.
    """
    length = cell.context
    while memory_bytes is not None and 2 * length <= most:
        estimate = estimate_memory(
            dataclasses.replace(cell, context=2 * length).config,
            cell.batch,
            autocast=True,
            recompute_every=cell.recompute_every,
            loss_chunk=cell.loss_chunk,
            shards=cell.shards,
            context_size=cell.processes,
        )
        if estimate.total > _USABLE * memory_bytes:
            break
        length *= 2
    return length
