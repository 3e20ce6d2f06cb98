"""Time measured so that implementations can be compared: short measurements, interleaved in rounds.

A device's clocks fall under load, so what is measured first, or after a pause, reads faster than the same code after
minutes of work. Here every contender is measured once a round, the order rotates from round to round, each
measurement is short and comes after the same pause, and ratios are taken within a round, between neighbours in time.

    times = compare({"softmax": lambda: x.softmax(-1), "sigmoid": lambda: x.sigmoid()}, device=x.device)
    times["softmax"].median, times["sigmoid"].speedup_over(times["softmax"])
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from cs336_systems.profiling.clocks import clock_of
from cs336_systems.profiling.memory import collection_paused, without_frames

Item = TypeVar("Item")


@dataclass(frozen=True)
class TimingMethod:
    """How long and how often to measure: times in milliseconds for one measurement, of which each round makes one."""

    rounds: int = 5
    warmup_ms: float = 5.0
    repetitions_ms: float = 15.0
    pause_ms: float = 30.0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1; got {self.rounds}")
        for name in ("warmup_ms", "repetitions_ms", "pause_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative; got {getattr(self, name)}")


@dataclass(frozen=True)
class RoundTimes:
    """The time of one contender in each round, in milliseconds and in the order of the rounds."""

    milliseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.milliseconds:
            raise ValueError("milliseconds must hold at least one round; got none")

    @property
    def median(self) -> float:
        """Median over the rounds, in milliseconds."""
        return statistics.median(self.milliseconds)

    @property
    def mean(self) -> float:
        """Mean over the rounds, in milliseconds."""
        return statistics.fmean(self.milliseconds)

    @property
    def minimum(self) -> float:
        """Fastest round, in milliseconds."""
        return min(self.milliseconds)

    @property
    def maximum(self) -> float:
        """Slowest round, in milliseconds."""
        return max(self.milliseconds)

    @property
    def standard_deviation(self) -> float:
        """Sample standard deviation over the rounds, in milliseconds; 0 for a single round."""
        return statistics.stdev(self.milliseconds) if len(self.milliseconds) > 1 else 0.0

    @property
    def coefficient_of_variation(self) -> float:
        """The standard deviation as a part of the mean; 0 where all rounds took no time."""
        return self.standard_deviation / self.mean if self.mean else 0.0

    def speedup_over(self, baseline: RoundTimes) -> float:
        """How many times faster than `baseline`: the median of the ratios within each round.

        Raises ValueError when the two were not measured in the same number of rounds.
        """
        if len(baseline.milliseconds) != len(self.milliseconds):
            raise ValueError(
                f"baseline must have the same {len(self.milliseconds)} rounds; got {len(baseline.milliseconds)}"
            )
        return statistics.median(
            theirs / ours for theirs, ours in zip(baseline.milliseconds, self.milliseconds, strict=True)
        )


def rotated(items: Sequence[Item], round_index: int) -> list[Item]:
    """The items in the order of one round: each round starts one item later than the round before."""
    if not items:
        return []
    start = round_index % len(items)
    return [*items[start:], *items[:start]]


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done all the work it was given. A CPU has nothing to wait for."""
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

    The device is idle before, and is waited for afterwards. Keep ``count`` small enough for its queue, which has room
    for about a thousand launches. On a CPU a call computes before it returns, so this is its whole time.
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
    """One short measurement of `function`: the median time of a call, in milliseconds.

    On CUDA it is measured with device events by `triton.testing.do_bench`, which clears the L2 cache before each call.
    A call that takes longer than all the repetitions together is timed once, after one call that is not timed. On
    other devices the clock is the wall's. `function` must already have been called once: whatever it compiles on its
    first call would be measured with it.
    """
    with collection_paused():
        if torch.device(device).type == "cuda":
            return _measure_on_cuda(function, method)
        return _measure_by_wall_clock(function, device, method)


def _measure_on_cuda(function: Callable[[], object], method: TimingMethod) -> float:
    # do_bench makes at least eight calls. Where one of them fills the whole window, one timed call says as much; two
    # agree on that before it is believed, because a single slow call may only have been an allocation.
    for _ in range(2):
        milliseconds = _event_milliseconds(function)
        if milliseconds < method.repetitions_ms:
            return _do_bench(function, method)
    return milliseconds


def _event_milliseconds(function: Callable[[], object]) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _do_bench(function: Callable[[], object], method: TimingMethod) -> float:
    # Imported here: Triton is needed for CUDA only, and it has no wheels for some systems.
    from triton.testing import do_bench

    median: Any = do_bench(function, warmup=method.warmup_ms, rep=method.repetitions_ms, return_mode="median")
    return float(median)


def _measure_by_wall_clock(function: Callable[[], object], device: torch.device | str, method: TimingMethod) -> float:
    warmed = call_milliseconds(function, device)
    while warmed < method.warmup_ms:
        warmed += call_milliseconds(function, device)
    times = [call_milliseconds(function, device)]
    while sum(times) < method.repetitions_ms:
        times.append(call_milliseconds(function, device))
    return statistics.median(times)


def consecutive_ms(function: Callable[[], object], count: int, *, device: torch.device | str) -> RoundTimes:
    """The time of each of so many calls that follow one another, as in a loop that does not wait for its device.

    On CUDA a time is that between two events which the device records, one before the first call and one after each:
    the host may run ahead, as it does in training, so that its own time counts only where the device waits for it. On
    other devices the clock is the wall's. `function` must already have been called, as for `measure_ms`.
    """
    with collection_paused():
        synchronize(device)
        clock = clock_of(device, count + 1)
        clock.mark()
        for _ in range(count):
            function()
            clock.mark()
        return RoundTimes(clock.intervals())


def interleave(
    measurements: Mapping[str, Callable[[], float]],
    *,
    method: TimingMethod,
    on_error: Callable[[str, Exception], None] | None = None,
    on_measurement: Callable[[str, int], None] | None = None,
) -> dict[str, RoundTimes]:
    """Make every measurement once a round, in an order that rotates, each after the same pause.

    `measurements` maps a name to a function that measures once and returns milliseconds. A measurement that raises is
    passed to `on_error`, is left out of the later rounds and is not in the result; without `on_error` the exception
    goes to the caller. `on_measurement(name, round_index)` is told what comes next, before the pause.
    """
    names = list(measurements)
    times: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(method.rounds):
        for name in rotated(names, round_index):
            if name not in times:
                continue
            if on_measurement is not None:
                on_measurement(name, round_index)
            time.sleep(method.pause_ms * 1e-3)
            failure: Exception | None = None
            try:
                times[name].append(measurements[name]())
            except Exception as error:
                if on_error is None:
                    raise
                failure = without_frames(error)
            if failure is not None and on_error is not None:
                # Reported out here, where nothing refers to the failed call's tensors any more.
                del times[name]
                on_error(name, failure)
    return {name: RoundTimes(tuple(rounds)) for name, rounds in times.items()}


def compare(
    functions: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    method: TimingMethod | None = None,
) -> dict[str, RoundTimes]:
    """Time several functions against one another, interleaved. Each is called once before anything is timed.

    Raises what a function raises.
    """
    chosen = TimingMethod() if method is None else method
    for function in functions.values():
        function()
    synchronize(device)

    def measurement(function: Callable[[], object]) -> Callable[[], float]:
        return lambda: measure_ms(function, device=device, method=chosen)

    return interleave({name: measurement(function) for name, function in functions.items()}, method=chosen)
