"""Calls in processes of their own: what ends them, and what they start with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lib.isolation import Finished, finish, map_isolated, run_isolated, step

ROOT = Path(__file__).resolve().parents[3]
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere processes are spawned")


def act(what: str) -> str:
    step(what, "provider")
    if what == "raise":
        raise ValueError("no\nsuch thing")
    if what == "exit":
        os._exit(11)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    if what == "finish":
        try:
            finish("finished")
        finally:
            time.sleep(600)
    return f"did {what}"


FAILURES = {
    "raise": "ValueError: no such thing",
    "exit": "the process ended with status 11, at: provider exit",
    "kill": "the process was killed by SIGKILL, as Linux does when memory runs out, at: provider kill",
}


def test_a_failure_ends_that_call_alone():
    jobs = ["a", "raise", "b", "exit", "kill", "c"]
    ends = {job[0]: finished for job, finished in map_isolated(act, [(job,) for job in jobs], processes=2)}
    assert set(ends) == set(jobs)
    for job, finished in ends.items():
        assert finished.failure == FAILURES.get(job, "")
        assert finished.result == (None if job in FAILURES else f"did {job}")
        assert finished.provider == "provider"


def test_a_call_that_exceeds_the_limit_is_killed():
    # Where it is depends on how fast processes start.
    assert run_isolated(act, "hang", limit=2).failure.startswith("took longer than 2 s, at: ")


def test_a_call_that_finishes_leaves_nothing_in_order():
    assert run_isolated(act, "finish", limit=200).result == "finished"
    with pytest.raises(RuntimeError, match="within an isolated call"):
        finish("nothing")


def test_steps_are_reported_and_without_a_parent_ignored():
    steps = []
    assert run_isolated(act, "a", on_step=lambda provider, text: steps.append((provider, text))).result == "did a"
    assert steps == [("provider", "a")]
    assert act("b") == "did b"


def test_a_caller_that_stops_kills_what_runs():
    start = time.monotonic()
    calls = map_isolated(act, [("a",), ("hang",), ("hang",)], processes=2)
    assert next(calls)[1] == Finished("did a", "", "provider")
    calls.close()
    assert time.monotonic() - start < 60


def start_of_process() -> dict[str, object]:
    import torch

    return {
        "parent": os.getppid(),
        "variable": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "set for imports": "TORCH_WARM_POOL" in os.environ,
        "no GPU used": not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork(),
        "threads of the server": len(os.listdir(f"/proc/{os.getppid()}/task")),
    }


@linux
def test_processes_are_forked_and_have_the_environment_of_the_moment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    first = run_isolated(start_of_process).result
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    second = run_isolated(start_of_process).result
    assert first["parent"] == second["parent"] != os.getpid()
    assert (first["variable"], second["variable"]) == ("5", None)
    assert not first["set for imports"]
    assert first["no GPU used"]
    assert first["threads of the server"] == 1


IMPORTS = """
import importlib, json, sys, torch
asked = []
for name in ("is_available", "device_count", "current_device", "get_device_capability", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *arguments, name=name, **more: asked.append(name) or 0)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(asked))
"""


@pytest.mark.slow
def test_imports_use_no_gpu():
    """The server imports them before it forks. is_available() asks the driver's management library there."""
    from cs336_systems.profiling.torch_names import COMPILER

    modules = ["benchmarks.attention", "benchmarks.host_overhead", "benchmarks.compare_trees", *COMPILER]
    command = [sys.executable, "-c", IMPORTS, *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*json.loads(done.stdout)} <= {"is_available"}


PROGRAM = """
from benchmarks.lib.isolation import run_isolated
from tests.benchmarks.lib.test_isolation import print_processes_and_hang
if __name__ == "__main__":
    run_isolated(print_processes_and_hang)
"""


def print_processes_and_hang() -> None:
    print(os.getpid(), os.getppid(), flush=True)
    time.sleep(600)


@linux
@pytest.mark.slow
def test_processes_end_with_the_program_even_if_it_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    processes = [int(text) for text in program.stdout.readline().split()]
    assert len(processes) == 2
    program.kill()
    program.wait()
    program.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, processes))


def runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
