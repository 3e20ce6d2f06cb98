"""Groups of processes: they always end, time the same steps, and say which processes a machine has no GPUs for."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.lib import process_groups
from benchmarks.lib.harness import Case, Outcome, Status
from benchmarks.lib.process_groups import run_group, slowest_of, time_together, too_few_gpus, unsupported
from benchmarks.lib.steps import most_steps_of
from cs336_systems.parallel import Layout
from cs336_systems.profiling import RoundTimes
from cs336_systems.profiling.steps import AllocatorStats, StepTimes

from ..small_models import CPU, context

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Told(Case):
    """A case whose processes do what it says."""

    what: str = ""

    @property
    def name(self):
        return "told"


def obey(case, options, layout):
    """Do what the case says in the second process, or in the only one, while the others wait."""
    Path(options.out, f"pid-{layout.rank}").write_text(str(os.getpid()))
    print(f"rank {layout.rank} speaks\n", end="", flush=True)  # one write: another process's may come between two
    if layout.rank == layout.size - 1:
        if case.what == "full":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if case.what == "exit":
            os._exit(3)
        if case.what == "hang":
            time.sleep(600)
    total = layout.all_reduce(torch.ones(1))
    return {"total": float(total), "threads": torch.get_num_threads(), "rank": layout.rank}


def obeyed(folder, what, processes=2, timeout=200.0):
    """The row of a group whose processes do this; all of them have ended."""
    mode = "ddp" if processes > 1 else "none"
    row = run_group(obey, Told(what), processes, mode, context(folder, timeout=timeout).options)
    pids = [path.read_text() for path in folder.glob("pid-*")]
    assert len(pids) == processes
    assert not any(map(alive, pids))
    return row


def alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("processes", [1, 2])
def test_a_group_measures_and_leaves_what_it_prints(tmp_path, monkeypatch, processes):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert obeyed(tmp_path, "measure", processes) == {"total": processes, "threads": 1, "rank": 0}
    text = (tmp_path / "logs/told.txt").read_text()
    assert sorted(text.splitlines()) == [f"rank {rank} speaks" for rank in range(processes)]


@pytest.mark.parametrize(
    ("what", "timeout", "status", "reason"),
    [
        ("full", 200.0, "oom", "CUDA out of memory"),
        ("exit", 200.0, "error", "the process ended with status 3"),
        pytest.param("hang", 30.0, "error", "took longer than 30 s", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_fails_ends_the_group_and_gives_the_reason(tmp_path, what, timeout, status, reason):
    row = obeyed(tmp_path, what, timeout=timeout)
    assert row["status"] == status
    assert row["reason"].startswith(reason)


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
