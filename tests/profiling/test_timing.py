"""Interleaving, rounds, ratios, and the choice between the ways to measure."""

from __future__ import annotations

import itertools
import math
import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.profiling import timing
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, compare, interleave, measure_ms, median_interval

QUICK = TimingMethod(rounds=2, warmup_ms=0, repetitions_ms=0, pause_ms=0)


def test_statistics_over_rounds():
    times = RoundTimes((3.0, 1.0, 2.0, 10.0))
    assert (times.median, times.minimum, times.maximum) == (2.5, 1.0, 10.0)
    assert times.standard_deviation == pytest.approx(4.0824829)
    assert RoundTimes((7.0,)).standard_deviation == 0


def test_the_speedup_is_the_median_of_ratios_within_rounds():
    baseline, ours = RoundTimes((10.0, 20.0, 60.0)), RoundTimes((5.0, 5.0, 20.0))
    assert ours.speedup_over(baseline) == 3.0  # of 2, 4 and 3; the ratio of the medians would be 4
    assert baseline.speedup_over(baseline) == 1.0


def test_an_interval_holds_the_median_as_often_as_it_says():
    """Of values with any distribution, here one with a long tail."""
    generator = random.Random(0)
    assert [median_interval(range(n)) for n in (1, 5, 6, 8, 9, 20, 25)] == [
        *((0, 0), (0, 4), (0, 5), (0, 7), (1, 7), (5, 14), (7, 17))
    ]
    assert median_interval(range(10_000)) == (4901, 5098)  # 1.96 standard deviations of 50 from the middle
    for rounds, least in ((6, 0.95), (9, 0.95), (25, 0.95)):
        samples = [[generator.expovariate(math.log(2)) for _ in range(rounds)] for _ in range(4000)]
        held = sum(low <= 1.0 <= high for low, high in map(median_interval, samples)) / len(samples)
        assert least - 0.01 <= held <= 0.98


def test_a_ratio_has_an_interval_of_its_own():
    ours, baseline = RoundTimes((1.0, 2.0, 4.0)), RoundTimes((3.0, 6.0, 10.0))
    assert (ours.interval, ours.speedup_interval(baseline)) == ((1.0, 4.0), (2.5, 3.0))
    assert [RoundTimes(times).is_precise for times in ((1.0, 1.015, 0.985), (1.0, 1.03, 1.0), (1.0, 0.97, 1.0))] == [
        *(True, False, False)
    ]


def test_rounds_are_repeated_until_every_median_is_precise():
    def measured(method, scattered):
        values = {"exact": itertools.repeat(1.0), "scattered": iter(scattered)}
        times = interleave({name: partial(next, each) for name, each in values.items()}, method=method)
        assert len(times["exact"].milliseconds) == len(times["scattered"].milliseconds)
        return len(times["exact"].milliseconds)

    once = [1.0, 1.0, 1.5, *[1.0] * 20]
    method = TimingMethod(rounds=3, most_rounds=12, pause_ms=0)
    assert measured(method, once) == 9  # of nine values the interval leaves out the least and the greatest
    assert measured(method, itertools.cycle([1.0, 2.0])) == 12
    assert measured(method, itertools.repeat(1.0)) == 3
    assert measured(TimingMethod(rounds=3, pause_ms=0), once) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RoundTimes((1.0, 2.0)).speedup_over(RoundTimes((1.0,))), "the same 2 rounds; got 1"),
        (lambda: RoundTimes(()), "at least one round"),
        (lambda: TimingMethod(rounds=3, most_rounds=2), "most_rounds must be at least the 3 rounds; got 2"),
        (lambda: TimingMethod(rounds=0), "rounds must be at least 1; got 0"),
        *(
            (lambda name=name: TimingMethod(**{name: -0.1}), f"{name} must not be negative; got -0.1")
            for name in ("warmup_ms", "repetitions_ms", "pause_ms")
        ),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_interleave_measures_all_once_a_round_in_rotated_order(monkeypatch):
    order, announced, pauses = [], [], []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def measurement(name, value):
        return lambda: order.append(name) or value

    times = interleave(
        {name: measurement(name, float(index)) for index, name in enumerate("abc")},
        method=TimingMethod(rounds=3, pause_ms=30),
        on_measurement=lambda name, index: announced.append((name, index)),
    )
    assert "".join(order) == "abcbcacab"
    assert announced[3:6] == [("b", 1), ("c", 1), ("a", 1)]
    assert times["c"].milliseconds == (2.0, 2.0, 2.0)
    assert pauses == [0.03] * 9
    assert interleave({}, method=QUICK) == {}


def test_a_failing_measurement_leaves_the_later_rounds():
    calls, failures = [], []

    def bad() -> float:
        calls.append("bad")
        if calls.count("bad") == 2:
            raise RuntimeError("worn out")
        return 1.0

    times = interleave(
        {"good": lambda: calls.append("good") or 1.0, "bad": bad},
        method=TimingMethod(rounds=4, pause_ms=0),
        on_error=lambda name, error: failures.append((name, str(error), error.__traceback__)),
    )
    assert failures == [("bad", "worn out", None)]  # without frames, which hold tensors
    assert list(times) == ["good"]
    assert (calls.count("good"), calls.count("bad")) == (4, 2)


@pytest.mark.parametrize(("error", "handler"), [(KeyError, None), (KeyboardInterrupt, print)])
def test_without_a_handler_the_failure_is_the_callers_and_interruptions_always_are(error, handler):
    def bad() -> float:
        raise error

    with pytest.raises(error):
        interleave({"bad": bad}, method=QUICK, on_error=handler)


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ((9.0, 9.0, 2.0, 30.0, 2.0, 2.0), 2.0),  # the first two warm up
        ((40.0, 50.0), 50.0),  # a long call is made twice only
    ],
)
def test_a_wall_clock_measurement_is_the_median_of_its_calls(monkeypatch, milliseconds, expected):
    """By a clock that only the calls move."""
    now, durations = [100.0], iter(milliseconds)

    def call() -> None:
        now[0] += next(durations) / 1e3

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    method = TimingMethod(warmup_ms=17, repetitions_ms=35)
    assert measure_ms(call, device="cpu", method=method) == pytest.approx(expected)
    assert next(durations, None) is None


@pytest.mark.parametrize(
    ("event_times", "expected"),
    [
        ([0.1], 3.0),  # short: do_bench measures it
        ([80.0, 0.1], 3.0),  # the first call only looked long
        ([80.0, 70.0], 70.0),  # long: the second call is the measurement
    ],
)
def test_on_cuda_long_calls_are_timed_singly(monkeypatch, event_times, expected):
    import triton.testing

    remaining, options = list(event_times), []
    clock = SimpleNamespace(mark=lambda: None, intervals=lambda: (remaining.pop(0),))
    monkeypatch.setattr(timing, "Clock", lambda device: clock)
    monkeypatch.setattr(triton.testing, "do_bench", lambda function, **given: options.append(given) or 3)
    method = TimingMethod(warmup_ms=5, repetitions_ms=15)
    assert measure_ms(lambda: None, device="cuda", method=method) == expected
    assert remaining == []
    assert options == [{"warmup": 5, "rep": 15, "return_mode": "median"}] * (expected == 3.0)


def test_compare_calls_each_function_before_it_times_any():
    calls: list[str] = []
    times = compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, device="cpu", method=QUICK)
    assert calls[:2] == ["a", "b"]
    assert set(times) == {"a", "b"}
    assert len(times["a"].milliseconds) == 2


@pytest.mark.gpu
def test_compare_on_a_gpu_orders_a_small_and_a_large_product():
    def product(size: int):
        matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        return lambda: matrix @ matrix

    times = compare({"small": product(512), "large": product(8192)}, device="cuda")
    assert 0 < times["small"].median < times["large"].median
    assert times["small"].speedup_over(times["large"]) > 2
