"""Sums over the work of a trace: kernels with their statistics, and the shares of classes and regions.

work = read_trace(path)
for kernel in kernel_statistics(work, steps=3)[:10]:
    print(kernel.name, kernel.milliseconds, kernel.share)
region_times(work, steps=3)["forward"]["attention: softmax"]["softmax"]  # milliseconds of a step
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cs336_systems.profiling.kernel_classes import class_of
from cs336_systems.profiling.trace import Work

WHOLE = "all"
"""In place of a pass: all of them."""

Totals = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Milliseconds of a step by pass, region and class."""


@dataclass(frozen=True)
class KernelStatistics:
    """All that a trace has of one kernel, in one pass or in all of them.

    Attributes:
        name: of the kernel, or of the operator on a CPU.
        of_class: of `kernel_classes.CLASSES`.
        of_pass: where it ran; WHOLE for everywhere.
        milliseconds: of a step, all instances together.
        share: these over those of all kernels in the same pass; 0 where all of them take no time.
        instances: of a step.
        mean_us, median_us, min_us, max_us, std_us: of single instances, in microseconds; the standard deviation is
            that of a sample, and 0 for one.
    """

    name: str
    of_class: str
    of_pass: str
    milliseconds: float
    share: float
    instances: float
    mean_us: float
    median_us: float
    min_us: float
    max_us: float
    std_us: float


def kernel_statistics(work: Iterable[Work], *, steps: int, of_pass: str = WHOLE) -> list[KernelStatistics]:
    """The kernels of a trace of so many steps, those that take longest first.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    _check(steps)
    times: dict[str, list[float]] = {}
    for one in work:
        if of_pass in (WHOLE, one.of_pass):
            times.setdefault(one.name, []).append(one.microseconds)
    total = sum(map(sum, times.values()))
    found = [
        KernelStatistics(
            name=name,
            of_class=class_of(name),
            of_pass=of_pass,
            milliseconds=sum(each) / steps * 1e-3,
            share=sum(each) / total if total else 0.0,
            instances=len(each) / steps,
            mean_us=statistics.fmean(each),
            median_us=statistics.median(each),
            min_us=min(each),
            max_us=max(each),
            std_us=statistics.stdev(each) if len(each) > 1 else 0.0,
        )
        for name, each in times.items()
    ]
    return sorted(found, key=lambda kernel: (-kernel.milliseconds, kernel.name))


def region_times(work: Iterable[Work], *, steps: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a step by pass, region and class. Raises ValueError when ``steps`` is below 1."""
    _check(steps)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for one in work:
        classes = found.setdefault(one.of_pass, {}).setdefault(one.region, {})
        name = class_of(one.name)
        classes[name] = classes.get(name, 0.0) + one.microseconds / steps * 1e-3
    return found


def total_ms(sums: Totals, *, of_pass: str = WHOLE, region: str | None = None, of_class: str | None = None) -> float:
    """Milliseconds of a step in one pass, region and class, or in all of those that are not named."""
    return sum(
        milliseconds
        for name, regions in sums.items()
        for where, classes in regions.items()
        for kind, milliseconds in classes.items()
        if of_pass in (WHOLE, name) and region in (None, where) and of_class in (None, kind)
    )


def class_shares(sums: Totals, *, of_pass: str = WHOLE) -> dict[str, float]:
    """The part of the time that each class takes, the largest first; empty where nothing takes any."""
    everything = total_ms(sums, of_pass=of_pass)
    kinds = {kind for regions in sums.values() for classes in regions.values() for kind in classes}
    found = {kind: total_ms(sums, of_pass=of_pass, of_class=kind) for kind in kinds}
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return {kind: time / everything for kind, time in ordered if time > 0}


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
