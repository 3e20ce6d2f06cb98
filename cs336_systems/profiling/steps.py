"""The time of each phase of a step of any model: forward, backward, update, each measured within one and the same step.

A phase lies between two marks of one clock: see `clocks`. On CUDA the host may run ahead, as it does in training, so
that its own time counts only where the device waits for it. No time is got from those of two measurements, one taken
from the other, so none can be negative, and the phases of a step add up to it.

    times = time_model(lambda: model(x).square().mean(), model, mode="forward+backward", device=x.device)
    times.phases["backward"].median, times.step.median, times.memory.peak_bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.profiling.clocks import clock_of
from cs336_systems.profiling.memory import collection_paused
from cs336_systems.profiling.timing import RoundTimes, call_milliseconds, synchronize

Mode = Literal["forward", "forward+backward", "step"]
"""Which phases a step has: the forward pass alone, under ``no_grad``; the backward pass too; and the update."""

MODES: tuple[Mode, ...] = ("forward", "forward+backward", "step")
FORWARD, BACKWARD, OPTIMIZER = PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class AllocatorReading:
    """What PyTorch's allocator had of a device's memory, in bytes; None where the device has no such count.

    Attributes:
        allocated_bytes: in tensors, after the last step.
        reserved_bytes: from the driver: the most during the timed steps on CUDA, after them on MPS.
        peak_bytes: the most in tensors during the timed steps. MPS has no such count, and a CPU none at all.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class StepTimes:
    """What was measured of steps, in milliseconds and in the order of the steps.

    Attributes:
        phases: by name, the time of each in every timed step.
        step: the phases together, in every timed step.
        warmup_ms: wall-clock time of each step before those, from an idle device to an idle device.
        memory: of the device, in the timed steps.
        host_ms: wall-clock time until the host was done with each timed step. A device that computes by itself may
            have long been done, or be behind; a host far ahead of it has to wait, so that of several steps the least
            is nearest to the host's own time. Where that is the step's time, the device waits for the host.
    """

    phases: Mapping[str, RoundTimes]
    step: RoundTimes
    warmup_ms: tuple[float, ...]
    memory: AllocatorReading
    host_ms: tuple[float, ...]

    @property
    def first_ms(self) -> float:
        """The time of the first step of all, which compiles and loads whatever is compiled and loaded once."""
        return self.warmup_ms[0] if self.warmup_ms else self.step.milliseconds[0]


def time_steps(
    phases: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str,
    steps: int = 10,
    warmup: int = 0,
    between: Callable[[], object] | None = None,
) -> StepTimes:
    """Time the phases of steps that follow one another, as in a loop that does not wait for its device.

    Args:
        phases: by name and in order, what a step calls; what one leaves for the next they have to keep themselves.
        device: where they compute.
        steps: that are timed, at least 1.
        warmup: steps before those. With 0 the first step is timed too, and what it compiles and loads with it.
        between: is called before each step, outside of what is timed.

    Raises:
        ValueError: there is no phase, or a number of steps is too small.
        Whatever a phase raises.
    """
    if not phases:
        raise ValueError("phases must have at least one function; got none")
    for name, number, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}; got {number}")
    where, functions = torch.device(device), tuple(phases.values())
    with _current(where):
        warmup_ms = tuple(_warm(functions, between, where) for _ in range(warmup))
        synchronize(where)
        _forget_peak(where)
        clock = clock_of(where, steps * (len(functions) + 1))
        with collection_paused():
            host_ms = _run(functions, steps, clock.mark, between)
            intervals = clock.intervals()
        memory = _memory_of(where)
    # After the phases of a step comes the time to the next step, which belongs to neither.
    rounds = [intervals[begin : begin + len(functions)] for begin in range(0, len(intervals), len(functions) + 1)]
    times = {name: RoundTimes(column) for name, column in zip(phases, zip(*rounds, strict=True), strict=True)}
    return StepTimes(times, RoundTimes(tuple(map(sum, rounds))), warmup_ms, memory, host_ms)


def time_model(
    loss: Callable[[], Float[Tensor, ""]],
    model: nn.Module,
    *,
    device: torch.device | str,
    mode: Mode = "forward+backward",
    update: Callable[[], object] | None = None,
    steps: int = 10,
    warmup: int = 1,
) -> StepTimes:
    """Time the passes of a model, each within the same step; see `time_steps`.

    Gradients that the backward pass of one step left are dropped before the next, outside of what is timed, so that
    none adds to earlier ones.

    Args:
        loss: the forward pass, up to a scalar; under autocast if that is to be measured. In the mode "forward" it is
            called under ``torch.no_grad()``, so that no graph is kept.
        model: whose gradients are dropped.
        device: where it computes.
        mode: which phases a step has.
        update: the phase "optimizer": steps the optimizer, and drops the gradients. For the mode "step" alone.
        steps, warmup: that are timed, and before those.

    Raises:
        ValueError: the mode is none, update is missing or not wanted, or a number of steps is too small.
        Whatever the model raises.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}; got {mode!r}")
    if (update is not None) != (mode == "step"):
        wanted = "a function" if mode == "step" else "None"
        raise ValueError(f"update must be {wanted} with mode={mode!r}; got {update!r}")
    losses: list[Tensor] = []

    def without_graph() -> None:
        with torch.no_grad():
            loss()

    phases: dict[str, Callable[[], object]] = {FORWARD: without_graph}
    if mode != "forward":
        phases = {FORWARD: lambda: losses.append(loss()), BACKWARD: lambda: losses.pop().backward()}
    if update is not None:
        phases[OPTIMIZER] = update
    # Of all parameters this takes longer than marks do, so it is left out where nothing has to be dropped.
    between = model.zero_grad if mode == "forward+backward" else None
    return time_steps(phases, device=device, steps=steps, warmup=warmup, between=between)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Events are recorded in a stream of the current device, which need not be that of the model."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _warm(
    functions: tuple[Callable[[], object], ...], between: Callable[[], object] | None, device: torch.device
) -> float:
    if between is not None:
        between()

    def step() -> None:
        for function in functions:
            function()

    return call_milliseconds(step, device)


def _run(
    functions: tuple[Callable[[], object], ...],
    steps: int,
    mark: Callable[[], None],
    between: Callable[[], object] | None,
) -> tuple[float, ...]:
    """The host's milliseconds of each step."""
    host_ms = []
    for _ in range(steps):
        if between is not None:
            between()
        begin = perf_counter()
        mark()
        for function in functions:
            function()
            mark()
        host_ms.append(1e3 * (perf_counter() - begin))
    return tuple(host_ms)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _memory_of(device: torch.device) -> AllocatorReading:
    if device.type == "cuda":
        return AllocatorReading(
            torch.cuda.memory_allocated(device),
            torch.cuda.max_memory_reserved(device),
            torch.cuda.max_memory_allocated(device),
        )
    if device.type == "mps":
        return AllocatorReading(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory())
    return AllocatorReading()
