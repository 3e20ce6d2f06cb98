"""Time measured so that implementations can be compared: short measurements, interleaved in rounds.

A device's clocks fall under load, so what is measured first, or after a pause, reads faster than the same code after
minutes of work. Here every function is measured once a round, the order rotates from round to round, each measurement
is short and comes after the same pause, and ratios are taken within a round, between neighbours in time. A median
has a confidence interval, and rounds are repeated until it is narrow.

    times = compare({"softmax": lambda: x.softmax(-1), "sigmoid": lambda: x.sigmoid()}, device=x.device)
    times["softmax"].median, times["softmax"].interval, times["sigmoid"].speedup_over(times["softmax"])
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.garbage import collection_paused
from .memory import without_frames

PRECISION = 0.02
"""A median is precise if its confidence interval is within this share of it, above and below."""
_OUTSIDE = 0.025  # the probability on either side of a confidence interval of 95 %


@dataclass(frozen=True)
class TimingMethod:
    """How long and how often to measure: times in milliseconds for one measurement, of which each round makes one.

    After ``rounds`` come more, up to ``most_rounds`` (by default none), while a median is not precise.
    """

    rounds: int = 5
    warmup_ms: float = 5.0
    repetitions_ms: float = 15.0
    pause_ms: float = 30.0
    most_rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1; got {self.rounds}")
        if self.most_rounds is not None and self.most_rounds < self.rounds:
            raise ValueError(f"most_rounds must be at least the {self.rounds} rounds; got {self.most_rounds}")
        for name in ("warmup_ms", "repetitions_ms", "pause_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}")


@dataclass(frozen=True)
class RoundTimes:
    """The times of one function in milliseconds, one for each round, and their statistics."""

    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.milliseconds:
            raise ValueError("milliseconds must hold at least one round; got none")

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.milliseconds)

    @property
    def minimum(self) -> float:
        return min(self.milliseconds)

    @property
    def maximum(self) -> float:
        return max(self.milliseconds)

    @property
    def standard_deviation(self) -> float:
        """Sample standard deviation; 0 for a single round."""
        return statistics.stdev(self.milliseconds) if len(self.milliseconds) > 1 else 0.0

    @property
    def coefficient_of_variation(self) -> float:
        """The standard deviation over the mean; 0 if all rounds took no time."""
        return self.standard_deviation / self.mean if self.mean else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the median; see `median_interval`."""
        return median_interval(self.milliseconds)

    @property
    def is_precise(self) -> bool:
        """Whether the interval is within `PRECISION` of the median."""
        return all(abs(end - self.median) <= PRECISION * self.median for end in self.interval)

    def speedup_over(self, baseline: RoundTimes) -> float:
        """How many times faster than ``baseline``: the median of the ratios within each round.

        Raises ValueError if the two were not measured in the same number of rounds.
        """
        return statistics.median(self._ratios(baseline))

    def speedup_interval(self, baseline: RoundTimes) -> tuple[float, float]:
        """The 95 % confidence interval of `speedup_over`, which raises the same."""
        return median_interval(self._ratios(baseline))

    def _ratios(self, baseline: RoundTimes) -> list[float]:
        ours, theirs = self.milliseconds, baseline.milliseconds
        if len(theirs) != len(ours):
            raise ValueError(f"baseline must have the same {len(ours)} rounds; got {len(theirs)}")
        return [before / after for before, after in zip(theirs, ours, strict=True)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of the values, as far from either end, that holds the true median with 95 % probability.

    The number of values below the true median is binomial with probability 1/2, whatever the distribution (Conover,
    "Practical Nonparametric Statistics", section 3.2). Fewer than six values cannot hold it so surely: of these the
    pair is the least and the greatest, whose probability is 1 - 2^(1 - n).
    """
    ordered, count, below = sorted(values), len(values), 0
    # Of 2^n outcomes, those of at most `below` values, and of one more. They are whole: a float cannot hold 2^1024.
    outside, more = 1, count
    while (outside + more) / 2**count <= _OUTSIDE:
        below, outside, more = below + 1, outside + more, more * (count - below - 1) // (below + 2)
    return ordered[below], ordered[-1 - below]


class Clock:
    """Marks in a computation, and the time between each and the next.

    On CUDA a mark is an event in the current stream, so the host runs ahead. Elsewhere it is the wall clock's time, on
    MPS after a synchronization.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark this point."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            synchronize(self._device)
            self._marks.append(time.perf_counter())

    def intervals(self) -> tuple[float, ...]:
        """Milliseconds between neighbouring marks; waits for the last one."""
        synchronize(self._device)
        pairs = itertools.pairwise(self._marks)
        if self._device.type == "cuda":
            return tuple(float(begin.elapsed_time(end)) for begin, end in pairs)
        return tuple(1e3 * (end - begin) for begin, end in pairs)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all its work. A CPU has nothing to wait for."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def call_milliseconds(function: Callable[[], object], device: torch.device | str) -> float:
    """Wall-clock milliseconds of one call, from an idle device to an idle device. For estimates: it is not repeated."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def host_milliseconds(function: Callable[[], object], count: int, *, device: torch.device | str) -> float:
    """Milliseconds that the host takes for a call, on average over ``count`` calls that do not wait for the device.

    Keep ``count`` small enough for the device's queue, which has room for about a thousand launches. On a CPU a call
    computes before it returns, so this is its whole time.
    """
    synchronize(device)
    with collection_paused():
        start = time.perf_counter()
        for _ in range(count):
            function()
        elapsed = time.perf_counter() - start
    synchronize(device)
    return elapsed * 1e3 / count


def measure_ms(function: Callable[[], object], *, device: torch.device | str, method: TimingMethod) -> float:
    """One short measurement of ``function``: the median time of a call, in milliseconds.

    On CUDA `triton.testing.do_bench` measures with device events, and clears the L2 cache before each call. A call that
    takes longer than all the repetitions together is timed once, after one call that is not timed. On other devices the
    clock is the wall's. Call ``function`` once before: what it compiles on its first call would be measured too.
    """
    with collection_paused():
        if torch.device(device).type == "cuda":
            return _measure_on_cuda(function, device, method)
        warmed = call_milliseconds(function, device)
        while warmed < method.warmup_ms:
            warmed += call_milliseconds(function, device)
        times = [call_milliseconds(function, device)]
        while sum(times) < method.repetitions_ms:
            times.append(call_milliseconds(function, device))
        return statistics.median(times)


def _measure_on_cuda(function: Callable[[], object], device: torch.device | str, method: TimingMethod) -> float:
    # do_bench makes at least eight calls. If a call fills the whole window, one is enough. It must be long twice,
    # because a single slow call may have been an allocation.
    for _ in range(2):
        clock = Clock(device)
        clock.mark()
        function()
        clock.mark()
        (milliseconds,) = clock.intervals()
        if milliseconds < method.repetitions_ms:
            # Imported here: Triton is needed for CUDA only, and has no wheels for some systems.
            from triton.testing import do_bench

            options: dict[str, Any] = {"warmup": method.warmup_ms, "rep": method.repetitions_ms}
            return float(do_bench(function, **options, return_mode="median"))
    return milliseconds


def interleave(
    measurements: Mapping[str, Callable[[], float]],
    *,
    method: TimingMethod,
    on_error: Callable[[str, Exception], None] | None = None,
    on_measurement: Callable[[str, int], None] | None = None,
) -> dict[str, RoundTimes]:
    """Make every measurement once a round, in an order that rotates, each after the same pause.

    All have the same number of rounds: as many as the least precise of them needs.

    Args:
        measurements: by name, functions that measure once and return milliseconds.
        on_error: called with a measurement that raises, which is left out of later rounds and of the result. Without
            it the exception goes to the caller.
        on_measurement: called with the name and the round's index, before the pause.
    """
    names = list(measurements)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(method.most_rounds or method.rounds):
        if round_index >= method.rounds and all(RoundTimes(tuple(rounds)).is_precise for rounds in times.values()):
            break
        first = round_index % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name not in times:
                continue
            if on_measurement is not None:
                on_measurement(name, round_index)
            time.sleep(method.pause_ms * 1e-3)
            try:
                times[name].append(measurements[name]())
                continue
            except Exception as error:
                if on_error is None:
                    raise
                failure, report = without_frames(error), on_error
            # Reported here, where nothing refers to the failed call's tensors any more.
            del times[name]
            report(name, failure)
    return {name: RoundTimes(tuple(rounds)) for name, rounds in times.items()}


def compare(
    functions: Mapping[str, Callable[[], object]], *, device: torch.device | str, method: TimingMethod | None = None
) -> dict[str, RoundTimes]:
    """Time functions, interleaved. Each is called once before anything is timed. Raises what a function raises."""
    method = method or TimingMethod()
    for function in functions.values():
        function()
    synchronize(device)
    options: dict[str, Any] = {"device": device, "method": method}
    calls = {name: functools.partial(measure_ms, function, **options) for name, function in functions.items()}
    return interleave(calls, method=method)
