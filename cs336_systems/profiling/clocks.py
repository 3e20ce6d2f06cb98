"""Marks in the course of a computation, and the time between each and the next, for every device.

On CUDA a mark is an event, which the device records when it gets there: the host runs ahead. On MPS a mark waits for
the device and reads the wall's clock; on a CPU it reads that clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter
from typing import Protocol

import torch


class Clock(Protocol):
    """Marks that follow one another, and afterwards the milliseconds between each and the next."""

    def mark(self) -> None:
        """Mark this point, in the device's current stream on CUDA."""

    def intervals(self) -> tuple[float, ...]:
        """Milliseconds, one less than there are marks; waits for the last of them."""


def clock_of(device: torch.device | str, marks: int) -> Clock:
    """A clock for so many marks of what the device computes."""
    where = torch.device(device)
    return _Events(where, marks) if where.type == "cuda" else _Wall(where)


class _Events:
    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        self._unused: Iterator[torch.cuda.Event] = iter(self._events)

    def mark(self) -> None:
        next(self._unused).record()

    def intervals(self) -> tuple[float, ...]:
        torch.cuda.synchronize(self._device)
        return tuple(float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(self._events))


class _Wall:
    def __init__(self, device: torch.device) -> None:
        self._waits = device.type == "mps"
        self._seconds: list[float] = []

    def mark(self) -> None:
        if self._waits:
            torch.mps.synchronize()
        self._seconds.append(perf_counter())

    def intervals(self) -> tuple[float, ...]:
        return tuple(1e3 * (end - begin) for begin, end in itertools.pairwise(self._seconds))
