"""The time of each phase of a training step, such as forward, backward and optimizer, for any model.

    times = time_steps({"forward": forward, "backward": backward, "optimizer": update}, device=x.device, warmup=2)
    times.phases["backward"].median, times.step.median, times.memory.peak_bytes

A phase lies between two marks of one `timing.Clock`, so the phases add up to the step. On CUDA marks are events, and
the host may run ahead, as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch

from ..kernels.garbage import collection_paused
from .timing import Clock, RoundTimes, call_milliseconds, synchronize

Phase = Callable[[], object]
_HOST_BOUND = 0.95


@dataclass(frozen=True)
class AllocatorStats:
    """Bytes by PyTorch's caching allocator; None where the device does not count them (CPU; the peak on MPS).

    Attributes:
        allocated_bytes: in tensors after the last step.
        reserved_bytes: from the driver: the maximum over the timed steps on CUDA, after them on MPS.
        peak_bytes: the maximum in tensors over the timed steps.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class StepTimes:
    """Times of steps, in milliseconds.

    Attributes:
        phases: by name, the time of each timed step.
        step: the sum of the phases of each timed step.
        warmup_ms: wall-clock time of each warm-up step, synchronized before and after.
        memory: in the timed steps.
        host_ms: wall-clock time that each timed step takes the host, which may run ahead of the device.
        clock_ms: wall-clock time of a step on average, with what is called between steps, from an idle device to an
            idle one.
    """

    phases: Mapping[str, RoundTimes]
    step: RoundTimes
    warmup_ms: tuple[float, ...]
    memory: AllocatorStats
    host_ms: tuple[float, ...]
    clock_ms: float

    @property
    def is_host_bound(self) -> bool:
        """Whether the device waits for the host: the step that took the host least took the device no longer.

        Where it does not wait, the host is ahead in that step, however much the times scatter.
        """
        host, whole = min(zip(self.host_ms, self.step.milliseconds, strict=True))
        return self.memory.allocated_bytes is not None and host >= _HOST_BOUND * whole

    @property
    def first_ms(self) -> float:
        """The time of the very first step, in which code is compiled and loaded."""
        return self.warmup_ms[0] if self.warmup_ms else self.step.milliseconds[0]


def time_steps(
    phases: Mapping[str, Phase],
    *,
    device: torch.device | str,
    steps: int = 10,
    most_steps: int | None = None,
    warmup: int = 0,
    between: Phase | None = None,
) -> StepTimes:
    """Time the phases of consecutive steps, without synchronization between them.

    Args:
        phases: by name, what a step calls, in order.
        device: where they run.
        steps: timed steps, at least 1.
        most_steps: at most this many, by default ``steps``. While the median of a step is not precise
            (`RoundTimes.is_precise`), ``steps`` more are timed, after one that is not.
        warmup: steps before the timed ones.
        between: called before each step, untimed, such as ``model.zero_grad``.

    Raises ValueError if there are no phases, or ``steps`` or ``warmup`` is too small.
    """
    if not phases:
        raise ValueError("phases must have at least one function; got none")
    most_steps = steps if most_steps is None else most_steps
    for name, number, least in (("steps", steps, 1), ("warmup", warmup, 0), ("most_steps", most_steps, steps)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}; got {number}")
    device, functions = torch.device(device), tuple(phases.values())
    before_step = between or (lambda: None)

    def synchronized_step() -> float:
        before_step()
        return call_milliseconds(lambda: [function() for function in functions], device)

    # CUDA events are recorded in a stream of the current device.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        warmup_ms = tuple(synchronized_step() for _ in range(warmup))
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        rounds, host_ms, elapsed_ms = _consecutive(functions, before_step, device, steps)
        while len(rounds) + steps <= most_steps and not RoundTimes(tuple(map(sum, rounds))).is_precise:
            synchronized_step()
            more = _consecutive(functions, before_step, device, steps)
            rounds, host_ms, elapsed_ms = rounds + more[0], host_ms + more[1], elapsed_ms + more[2]
        memory = _allocator_stats(device)
    times = {name: RoundTimes(column) for name, column in zip(phases, zip(*rounds, strict=True), strict=True)}
    step = RoundTimes(tuple(map(sum, rounds)))
    return StepTimes(times, step, warmup_ms, memory, tuple(host_ms), elapsed_ms / len(rounds))


def _consecutive(
    functions: tuple[Phase, ...], before_step: Phase, device: torch.device, steps: int
) -> tuple[list[tuple[float, ...]], list[float], float]:
    """The milliseconds of the phases of each step, those of each step on the host, and those of all steps."""
    clock = Clock(device)
    with collection_paused():
        begin = perf_counter()
        host_ms = [_timed_step(functions, clock, before_step) for _ in range(steps)]
        synchronize(device)
        elapsed_ms = 1e3 * (perf_counter() - begin)
    intervals = clock.intervals()
    # After the phases of a step comes the interval until the next step.
    starts = range(0, len(intervals), len(functions) + 1)
    return [intervals[start : start + len(functions)] for start in starts], host_ms, elapsed_ms


def _timed_step(functions: tuple[Phase, ...], clock: Clock, before_step: Phase) -> float:
    """Milliseconds of the host."""
    before_step()
    begin = perf_counter()
    clock.mark()
    for function in functions:
        function()
        clock.mark()
    return 1e3 * (perf_counter() - begin)


def _allocator_stats(device: torch.device) -> AllocatorStats:
    if device.type == "mps":
        return AllocatorStats(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    if device.type != "cuda":
        return AllocatorStats()
    counters = (torch.cuda.memory_allocated, torch.cuda.max_memory_reserved, torch.cuda.max_memory_allocated)
    return AllocatorStats(*(counter(device) for counter in counters))
