"""Devices by their names."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ENOUGH_WORK = 0.5
"""Seconds: what takes as long by itself is faster with all threads, and slow to try."""


def choose_device(name: str) -> torch.device:
    """The device of a name, or for "auto" the first of cuda, mps and cpu that is there.

    Raises:
        ValueError: there is no such device.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cuda, cuda:1, mps or cpu; got {name!r}") from None
    if not present.get(device.type, False):
        there = ", ".join(kind for kind, is_there in present.items() if is_there)
        raise ValueError(f"device must be one that torch finds here ({there}); got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of {torch.cuda.device_count()} GPUs, from cuda:0 on; got {name!r}")
    return device


def fastest_threads(work: Callable[[], object]) -> int:
    """How many of torch's threads ``work`` takes the least time with; the fewest, of numbers that are nearly as fast.

    More threads are not always faster: they wait for each other after every operation. If operations are short, that
    takes longer than the work, and much longer if other programs use the cores.
    """
    most = torch.get_num_threads()
    times: dict[int, list[float]] = {threads: [] for threads in sorted({1, max(1, most // 2), most})}
    try:
        work()
        for _ in range(3):
            for threads, taken in times.items():
                torch.set_num_threads(threads)
                start = time.perf_counter()
                work()
                taken.append(time.perf_counter() - start)
                if threads == 1 and taken[0] > ENOUGH_WORK:
                    return most
    finally:
        torch.set_num_threads(most)
    medians = {threads: statistics.median(taken) for threads, taken in times.items()}
    return next(threads for threads, taken in medians.items() if taken <= 1.1 * min(medians.values()))
