"""Jobs in processes of their own, and what these begin with."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import models, nursery
from benchmarks.processes import run_jobs

ROOT = Path(__file__).resolve().parents[2]
forks = pytest.mark.skipif(not nursery.HERE, reason="processes are forked on Linux alone")


def job(what: str) -> str:
    if what == "raise":
        raise ValueError("no")
    if what == "die":
        os._exit(11)
    if what == "hang":
        time.sleep(600)
    return f"did {what}"


def born(name: str) -> SimpleNamespace:
    """What a process begins with, and the one that forked it."""
    import torch

    return SimpleNamespace(
        imported=name in sys.modules,
        threads=torch.get_num_threads(),
        variable=os.environ.get("CUDA_VISIBLE_DEVICES"),
        parent=os.getppid(),
        threads_of_parent=len(os.listdir(f"/proc/{os.getppid()}/task")),
        no_gpu_yet=not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork(),
    )


def lock(_: str) -> str:
    """As a progress bar does that a compiler shows."""
    multiprocessing.RLock().acquire()
    return "locked"


def only(function, job, **options):
    (finished,) = run_jobs(function, [job], processes=1, seconds_each=100, **options)
    assert not finished.failure
    return finished.result


@pytest.mark.parametrize("forked", [pytest.param(True, marks=forks), False])
def test_a_failure_is_that_jobs_alone(forked, monkeypatch):
    monkeypatch.setattr(nursery, "HERE", forked)
    jobs = ["a", "raise", "b", "die", "c", "hang", "d"]
    # The limit has room for the start of a process, on a machine that is busy.
    over = {finished.job: finished for finished in run_jobs(job, jobs, processes=2, seconds_each=15)}
    assert set(over) == set(jobs)
    assert [over[name].result for name in "abcd"] == [f"did {name}" for name in "abcd"]
    assert {over[name].failure for name in "abcd"} == {""}
    assert over["raise"].failure == "ValueError: no"
    assert over["die"].failure == "ended its process, with status 11"
    assert over["hang"].failure == "took longer than 15 s"


def test_everything_stops_at_the_deadline():
    start = time.monotonic()
    assert list(run_jobs(job, ["hang"] * 3, processes=2, seconds_each=600, deadline=start + 1)) == []
    assert time.monotonic() - start < 60


def test_nothing_to_do():
    assert list(run_jobs(job, [], processes=2, seconds_each=1)) == []


@forks
def test_processes_begin_with_what_is_preloaded_and_are_one_jobs_alone():
    assert "wave" not in sys.modules
    first, second = (only(born, "wave", preload=["wave"]) for _ in range(2))
    assert first.imported
    assert first.parent == second.parent != os.getpid()
    assert only(born, "wave").parent == first.parent  # what is there already is no reason to import anything anew


@forks
def test_what_cannot_be_preloaded_is_the_jobs_own_affair(capfd):
    assert only(job, "a", preload=["no_such_module"]) == "did a"
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.parametrize("forked", [pytest.param(True, marks=forks), False])
def test_processes_have_the_environment_of_the_moment(forked, monkeypatch):
    monkeypatch.setattr(nursery, "HERE", forked)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # read when torch is imported
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    before = only(born, "os")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    after = only(born, "os")
    assert (before.threads, before.variable) == (min(2, os.cpu_count() or 1), "5")
    assert (after.threads, after.variable) == (1, None)
    assert not nursery._FOR_IMPORTS.keys() & os.environ.keys()


@forks
def test_jobs_at_work_outlive_a_change_of_the_environment(monkeypatch):
    at_work = run_jobs(job, ["a", "b", "c"], processes=1, seconds_each=60)
    assert next(at_work).result == "did a"
    monkeypatch.setenv("SOMETHING", "else")
    assert only(job, "d") == "did d"
    assert [finished.failure for finished in at_work] == ["", ""]


def modules_of_programs() -> dict[str, tuple[str, ...]]:
    """By program, the modules that the processes of its cases have imported when they begin."""
    programs = ("transformer", "training_step", "breakdown", "memory", "precision", "leaderboard")
    imported = {name: importlib.import_module(f"benchmarks.{name}") for name in programs}
    modules = {name: (f"benchmarks.{name}", *module.PROGRAM.preload) for name, module in imported.items()}
    options = argparse.Namespace(compile=["blocks"], providers=["llama"])
    modules["models"] = models.preload(options)
    return modules | {"features": ("benchmarks.feature_cells",), "tune": ("benchmarks.tune_trial",)}


PRELOADS = """
import importlib, json, sys, torch
asked = []
for name in ("is_available", "device_count", "current_device", "get_device_capability", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *arguments, name=name, **more: asked.append(name) or 0)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(asked))
"""


def everything() -> list[str]:
    return sorted({name for modules in modules_of_programs().values() for name in modules})


def test_what_is_preloaded_asks_no_gpu():
    """Except whether there is one: with what `nursery` sets for imports, torch asks the driver's management library."""
    command = [sys.executable, "-c", PRELOADS, *everything()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*json.loads(done.stdout)} <= {"is_available"}
    assert nursery._FOR_IMPORTS["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


@forks
def test_what_is_preloaded_leaves_no_thread_and_no_gpu_in_use():
    found = only(born, "torch._inductor.compile_fx", preload=everything())
    assert found.imported
    assert found.no_gpu_yet
    # With torch 2.11, on a machine with a GPU, two more were seen; what they do was not looked into.
    assert found.threads_of_parent == 1 or torch.cuda.is_available()


PROGRAM = """
import sys
from tests.benchmarks.test_processes import born, job, lock, only
if __name__ == "__main__":
    {}
"""


def started(tmp_path: Path, line: str) -> subprocess.Popen[str]:
    (tmp_path / "program.py").write_text(PROGRAM.format(line))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "program.py")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_is_done_gives_back_what_it_holds(tmp_path):
    said, complaints = started(tmp_path, "print(only(lock, 'a'), only(lock, 'b'))").communicate(timeout=100)
    assert said == "locked locked\n"
    assert "leaked" not in complaints


@forks
def test_nothing_outlives_the_program(tmp_path):
    line = "print(only(born, 'os').parent, flush=True); only(job, 'hang')"
    program = started(tmp_path, line)
    assert program.stdout is not None
    parent = int(program.stdout.readline())
    children = Path(f"/proc/{parent}/task/{parent}/children")
    deadline = time.monotonic() + 60
    while not children.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    of_parent = [int(child) for child in children.read_text().split()]
    assert of_parent
    program.send_signal(signal.SIGKILL)
    program.communicate()
    while any(map(_runs, [parent, *of_parent])) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, [parent, *of_parent]))


def _runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
