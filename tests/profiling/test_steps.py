"""Phases of a step: their order and their times."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.profiling import steps, timing
from cs336_systems.profiling.steps import AllocatorStats, StepTimes, time_steps
from cs336_systems.profiling.timing import RoundTimes


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances only in the functions that it makes."""

    class Clock:
        def __init__(self):
            self.now = 0.0
            self.calls: list[str] = []

        def taking(self, name, milliseconds):
            def function():
                self.calls.append(name)
                self.now += milliseconds(self.calls.count(name)) * 1e-3

            return function

    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_each_phase_has_its_own_time_and_together_they_are_the_step(clock):
    phases = {
        "forward": clock.taking("forward", lambda number: 10.0 * number),
        "backward": clock.taking("backward", lambda number: 7.0),
        "optimizer": clock.taking("optimizer", lambda number: 0.5),
    }
    times = time_steps(phases, device="cpu", steps=3)
    assert list(times.phases) == ["forward", "backward", "optimizer"]
    assert times.phases["forward"].milliseconds == pytest.approx((10, 20, 30))
    assert times.phases["backward"].milliseconds == pytest.approx((7, 7, 7))
    assert times.step.milliseconds == pytest.approx((17.5, 27.5, 37.5))
    assert times.step.mean == pytest.approx(27.5)
    assert times.step.coefficient_of_variation == pytest.approx(10 / 27.5)
    assert clock.calls == ["forward", "backward", "optimizer"] * 3


def test_the_host_and_the_device_are_timed_separately(clock, monkeypatch):
    monkeypatch.setattr(steps, "perf_counter", lambda: clock.now)
    # A device that needs 1 ms, whatever the host does.
    monkeypatch.setattr(timing.Clock, "intervals", lambda self: (1.0,) * 5)
    phases = {"only": clock.taking("only", lambda number: 4.0 * number)}
    times = time_steps(phases, device="cpu", steps=3, between=clock.taking("between", lambda number: 99.0))
    assert times.host_ms == pytest.approx((4, 8, 12))
    assert times.step.milliseconds == pytest.approx((1, 1, 1))


def test_what_comes_between_steps_is_in_no_time_and_nothing_is_collected_then(clock):
    enabled = []
    phases = {"only": clock.taking("only", lambda number: 1.0), "collection": lambda: enabled.append(gc.isenabled())}
    times = time_steps(phases, device="cpu", steps=2, warmup=1, between=clock.taking("between", lambda number: 99.0))
    assert times.step.milliseconds == pytest.approx((1, 1))
    assert clock.calls == ["between", "only"] * 3
    assert enabled == [True, False, False]
    assert times.memory == AllocatorStats()


def test_steps_before_the_timed_ones_take_the_cold_start(clock):
    def cold(number):
        return 500.0 if number == 1 else 2.0

    warm = time_steps({"step": clock.taking("warm", cold)}, device="cpu", steps=3, warmup=2)
    assert warm.step.milliseconds == pytest.approx((2, 2, 2))
    assert len(warm.warmup_ms) == 2
    assert warm.first_ms == warm.warmup_ms[0]
    first = time_steps({"step": clock.taking("cold", cold)}, device="cpu", steps=3)
    assert first.step.milliseconds == pytest.approx((500, 2, 2))
    assert first.warmup_ms == ()
    assert first.first_ms == pytest.approx(500)


@pytest.mark.parametrize(("scattered", "most", "count"), [(0.0, 30, 4), (1.0, 30, 12), (1.0, None, 4), (9.0, 11, 8)])
def test_steps_are_repeated_until_the_median_is_precise(clock, scattered, most, count):
    """Of twelve steps the interval leaves out two at either end."""

    def milliseconds(number):
        return 10.0 + (scattered if number in (2, 3) or (scattered > 1 and number % 2) else 0.0)

    phases = {"one": clock.taking("one", milliseconds), "other": clock.taking("other", lambda number: 5.0)}
    times = time_steps(phases, device="cpu", steps=4, most_steps=most)
    assert [len(each.milliseconds) for each in (times.step, *times.phases.values())] == [count] * 3
    assert len(times.host_ms) == count
    assert len(clock.calls) == 2 * (count + count // 4 - 1)  # before four more comes one that is not timed


def test_the_clock_counts_what_comes_between_steps_too(clock, monkeypatch):
    monkeypatch.setattr(steps, "perf_counter", lambda: clock.now)
    phases = {"only": clock.taking("only", lambda number: 2.0)}
    times = time_steps(phases, device="cpu", steps=3, between=clock.taking("between", lambda number: 1.0))
    assert times.step.median == pytest.approx(2)
    assert times.clock_ms == pytest.approx(3)


def test_a_device_that_waits_for_the_host():
    def bound(*host_ms, allocated=1):
        memory = AllocatorStats(allocated)
        return StepTimes({}, RoundTimes((10.0, 30.0, 20.0)), (), memory, host_ms, 10.0).is_host_bound

    assert [bound(9.4, 30.0, 20.0), bound(9.6, 30.0, 20.0), bound(9.6, 30.0, 20.0, allocated=None)] == [
        False,
        True,
        False,
    ]
    assert not bound(20.0, 30.0, 1.0)  # the third step was queued while the others ran


@pytest.mark.parametrize(
    ("phases", "arguments", "message"),
    [
        ({}, {}, "phases must have at least one function; got none"),
        ({"only": print}, {"steps": 0}, "steps must be at least 1; got 0"),
        ({"only": print}, {"steps": 3, "most_steps": 2}, "most_steps must be at least 3; got 2"),
        ({"only": print}, {"warmup": -1}, "warmup must be at least 0; got -1"),
    ],
)
def test_invalid_arguments(phases, arguments, message):
    with pytest.raises(ValueError, match=message):
        time_steps(phases, device="cpu", **arguments)


@pytest.mark.gpu
def test_on_a_gpu_the_phases_add_up_to_the_walls_time_and_memory_is_counted():
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def products(count):
        def run():
            for _ in range(count):
                torch.mm(matrix, matrix)

        return run

    begin = time.perf_counter()
    times = time_steps({"few": products(10), "many": products(40)}, device="cuda", steps=5, warmup=1)
    wall = (time.perf_counter() - begin) * 1e3 - times.warmup_ms[0]
    assert 0.5 * wall < sum(times.step.milliseconds) <= wall
    assert times.phases["many"].median > 2 * times.phases["few"].median > 0
    memory = times.memory
    assert 2 * 4096**2 <= memory.allocated_bytes <= memory.peak_bytes <= memory.reserved_bytes


@pytest.mark.gpu
def test_on_a_gpu_the_host_runs_ahead(waiting_forbidden):
    matrix = torch.randn(256, 256, device="cuda")
    marks = timing.Clock("cuda")
    torch.mm(matrix, matrix)
    with waiting_forbidden():
        for _ in range(2):
            steps._timed_step((lambda: torch.mm(matrix, matrix),), marks, lambda: None)
    assert all(interval >= 0 for interval in marks.intervals())
    assert len(marks.intervals()) == 3
