"""Groups of processes: they time the same steps, and say which processes a machine has no GPUs for."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import process_groups
from benchmarks.harness import Outcome, Status
from benchmarks.process_groups import slowest_of, time_together, too_few_gpus, unsupported
from benchmarks.steps import most_steps_of
from cs336_systems.parallel import Layout
from cs336_systems.profiling import RoundTimes
from cs336_systems.profiling.steps import AllocatorStats, StepTimes

from .small_models import CPU

CUDA = torch.device("cuda")


def times(forward, backward, peak=None, allocated=None, host=0.5):
    phases = {"forward": RoundTimes(forward), "backward": RoundTimes(backward)}
    step = RoundTimes(tuple(map(sum, zip(forward, backward, strict=True))))
    return StepTimes(phases, step, (), AllocatorStats(allocated, None, peak), (host,) * len(forward), 1.0)


def test_phases_are_those_of_the_process_that_is_slowest_in_the_step():
    one, other = times((1.0, 5.0), (2.0, 1.0), peak=100), times((2.0, 1.0), (2.0, 3.0), peak=50)
    found = slowest_of([[one, other], [times((1.0,), (1.0,), peak=70), times((3.0,), (1.0,), peak=80)]])
    assert found.step.milliseconds == (4.0, 6.0, 4.0)
    assert found.phases["forward"].milliseconds == (2.0, 5.0, 3.0)
    assert found.phases["backward"].milliseconds == (2.0, 1.0, 1.0)
    assert (found.peak_bytes_of_each, found.host_bound) == ([100, 80], False)
    assert slowest_of([[times((1.0,), (1.0,), host=2.0, allocated=1)]]).host_bound
    assert slowest_of([[times((1.0,), (1.0,))]]).peak_bytes_of_each == [None]


@pytest.mark.parametrize(("most", "batches"), [(2, 1), (5, 2), (6, 3)])
def test_more_steps_until_the_median_is_precise(monkeypatch, most, batches):
    calls = []

    def time_steps(phases, *, warmup, **how):
        calls.append(warmup)
        return times((1.0, 2.0), (1.0, 1.0))

    monkeypatch.setattr(process_groups, "time_steps", time_steps)
    found = time_together({"step": print}, Layout(CPU), steps=2, most_steps=most, warmup=5)
    assert calls == [5, *[1] * (batches - 1)]
    assert len(found.step.milliseconds) == 2 * batches
    monkeypatch.setattr(process_groups, "time_steps", lambda phases, **how: times((1.0, 1.0), (1.0, 1.0)))
    assert len(time_together({}, Layout(CPU), steps=2, most_steps=100, warmup=5).step.milliseconds) == 2


def test_how_many_steps_at_most():
    def options(**given):
        return argparse.Namespace(**{"steps": 5, "most_steps": None, "device": CPU, **given})

    assert [most_steps_of(options()), most_steps_of(options(device=CUDA))] == [5, 25]
    assert [most_steps_of(options(most_steps=20)), most_steps_of(options(most_steps=1))] == [20, 5]


def test_processes_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert too_few_gpus(2, CUDA) == "2 processes need 2 GPUs, one each; this machine has 1"
    assert (too_few_gpus(1, CUDA), too_few_gpus(6, CPU), unsupported(None)) == (None, None, None)
    assert unsupported("no") == Outcome(Status.UNSUPPORTED, "no")
