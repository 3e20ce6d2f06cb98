"""Statistics of kernels, and shares of classes and regions."""

from __future__ import annotations

import pytest

from cs336_systems.profiling.shares import class_shares, kernel_statistics, region_times, total_ms
from cs336_systems.profiling.trace import Work


def work(name, microseconds, of_pass="forward", region="mlp"):
    return Work(name, microseconds, of_pass, region, True)


TWO_STEPS = [
    *(work("aten::mm", time) for time in (100.0, 200.0, 300.0, 600.0)),
    work("aten::mm", 400.0, "backward"),
    work("aten::mm", 400.0, "backward"),
    work("aten::_softmax", 500.0, region="attention: softmax"),
    work("aten::_softmax", 1500.0, region="attention: softmax"),
]


def test_statistics_are_of_a_step_and_of_instances():
    first, second = kernel_statistics(TWO_STEPS, steps=2)
    assert (first.name, second.name) == ("aten::_softmax", "aten::mm")
    assert (first.milliseconds, first.share, first.instances) == (1.0, 0.5, 1.0)
    assert (second.milliseconds, second.share, second.instances) == (1.0, 0.5, 3.0)
    assert (first.mean_us, first.median_us, first.min_us, first.max_us) == (1000.0, 1000.0, 500.0, 1500.0)
    assert first.std_us == pytest.approx(1000 / 2**0.5)
    assert second.median_us == 350.0
    assert second.of_class == "matrix products"


def test_statistics_of_a_pass_are_of_this_pass():
    (backward,) = kernel_statistics(TWO_STEPS, steps=2, of_pass="backward")
    assert (backward.milliseconds, backward.share, backward.std_us) == (0.4, 1.0, 0.0)
    assert backward.of_pass == "backward"
    (alone,) = kernel_statistics([work("aten::mm", 3.0)], steps=1)
    assert alone.std_us == 0.0
    assert kernel_statistics([], steps=1) == []


def test_totals_and_shares():
    sums = region_times(TWO_STEPS, steps=2)
    assert sums["forward"] == {
        "mlp": {"matrix products": pytest.approx(0.6)},
        "attention: softmax": {"softmax": pytest.approx(1.0)},
    }
    assert sums["backward"] == {"mlp": {"matrix products": pytest.approx(0.4)}}
    assert total_ms(sums) == pytest.approx(2.0)
    assert total_ms(sums, region="mlp") == pytest.approx(1.0)
    assert total_ms(sums, of_pass="forward", of_class="matrix products") == pytest.approx(0.6)
    assert class_shares(sums) == pytest.approx({"matrix products": 0.5, "softmax": 0.5})
    of_forward = class_shares(sums, of_pass="forward")
    assert list(of_forward) == ["softmax", "matrix products"]
    assert of_forward == pytest.approx({"softmax": 0.625, "matrix products": 0.375})
    assert class_shares({}) == {}


def test_no_steps_are_refused():
    for function in (kernel_statistics, region_times):
        with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
            function(TWO_STEPS, steps=0)
