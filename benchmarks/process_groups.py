"""Groups of processes that measure a case together: how they are started and ended, and how they time what they do.

torchrun starts the module of a benchmark once for each process, with a job in JSON. The processes measure, and one of
them writes the columns of the case into a file. A group has always ended when its row is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.harness import Case, Outcome, Row, Status
from benchmarks.models import file_of
from benchmarks.results import error, outcome_of
from cs336_systems.files import write_text
from cs336_systems.parallel import Layout, start
from cs336_systems.parallel.layout import NONE
from cs336_systems.profiling.steps import Phase, StepTimes, time_steps
from cs336_systems.profiling.timing import RoundTimes

RESULT, FAILURE = "result.json", "failure-{}.json"
ROOT = Path(__file__).resolve().parents[1]
_SECONDS_TO_END = 45.0
"""torchrun gives its processes 30 s before it kills them. If it were killed first, they would go on."""

CaseT = TypeVar("CaseT", bound=Case)


def too_few_gpus(processes: int, device: torch.device) -> str | None:
    """Why this machine has too few GPUs for these processes; None if it has enough, or if they compute on the CPU."""
    gpus = torch.cuda.device_count()
    if device.type != "cuda" or processes <= gpus:
        return None
    return f"{processes} processes need {processes} GPUs, one each; this machine has {gpus}"


def require_group_device(parser: ArgumentParser, device: torch.device) -> None:
    """End the program with a message unless groups can compute on the device: each process chooses its GPU itself."""
    if device.type not in ("cpu", "cuda") or device.index is not None:
        parser.error(f"--device must be cuda or cpu; got {device}")


def run_group(
    case: Case, processes: int, options: Namespace, module: Sequence[str], settings: Iterable[str] = ("seed",)
) -> Row:
    """The columns that a group of processes measures. The group has ended when this returns.

    Its output is in logs/ of the results.

    Args:
        case: sent to the processes as JSON.
        processes: of the group; one is started without torchrun.
        options: the command line, of which the processes get the device's type, ``timeout`` and ``settings``.
        module: what Python runs in each process, such as ``("-m", "benchmarks.scaling_process")``; it calls
            `run_process`.
    """
    log = file_of(options.out, "logs", case, "txt")
    job = {"case": dataclasses.asdict(case), "device": options.device.type}
    job |= {name: getattr(options, name) for name in ("timeout", *settings)}
    # One thread for each process, as torchrun sets it, also without torchrun.
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    late = False
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node"]
        group_of = [] if processes == 1 else [*torchrun, str(processes)]
        command = [sys.executable, *group_of, *module, json.dumps(job | {"folder": folder})]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT) as group:
            try:
                group.wait(options.timeout)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                group.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    group.wait(_SECONDS_TO_END)
                group.kill()
        row = result_of(Path(folder))
    if row is not None:
        return row
    if late:
        return error(f"took longer than {options.timeout:g} s").columns
    last = " ".join(log.read_text(errors="replace").split("\n")[-12:])
    return error(f"ended with status {group.returncode}: {last}").columns


def result_of(folder: Path) -> Row | None:
    """What the processes wrote: the figures, or why there are none; None if they ended before they could.

    If memory runs out in one process, others fail since it is gone: its failure is the one to report.
    """
    if (folder / RESULT).exists():
        return json.loads((folder / RESULT).read_text())
    failures = [json.loads(path.read_text()) for path in sorted(folder.glob(FAILURE.format("*")))]
    return min(failures, key=lambda failure: failure["status"] != Status.OUT_OF_MEMORY.value, default=None)


def run_process(
    arguments: Sequence[str],
    case_of: Callable[..., CaseT],
    measure: Callable[[Mapping[str, Any], CaseT, Layout], Row],
    mode_of: Callable[[CaseT], str],
) -> None:
    """Measure the job in the argument, which is JSON, and write the result into its folder.

    A process that fails writes why, and exits at once: the others wait for it inside of a step, so that leaving the
    process group in order would hang. torchrun ends them.

    Args:
        case_of: makes the case from its fields.
        measure: the columns of the case, in each process; those of rank 0 are written.
        mode_of: how the processes share the work, one of `cs336_systems.parallel.MODES`; "none" without a group.
    """
    job = json.loads(arguments[0])
    case, folder = case_of(**job["case"]), Path(job["folder"])
    try:
        mode = mode_of(case)
        torch.set_float32_matmul_precision("high" if job.get("tf32") else "highest")
        patience = None if mode == NONE else timedelta(seconds=job["timeout"])
        with start(mode, torch.device(job["device"]), None, patience) as layout:
            row = measure(job, case, layout)
            if layout.is_main:
                write_text(folder / RESULT, json.dumps(row))
            layout.all_gather(None)  # no process leaves the group while another still communicates
    except Exception as exception:
        traceback.print_exc()
        write_text(folder / FAILURE.format(os.environ.get("RANK", "0")), json.dumps(outcome_of(exception).columns))
        sys.stderr.flush()
        os._exit(1)


@dataclass(frozen=True)
class GroupTimes:
    """Times of steps that processes take together: in each step those of the process that is slowest in it.

    Attributes:
        step: milliseconds of each step.
        phases: by name, so that the phases of a step add up to it.
        host_bound: whether the device of any process waits for its host.
        peak_bytes_of_each: the most that each process's allocator held in the timed steps; None where it counts none.
    """

    step: RoundTimes
    phases: dict[str, RoundTimes]
    host_bound: bool
    peak_bytes_of_each: list[int | None]


def slowest_of(batches: Sequence[Sequence[StepTimes]]) -> GroupTimes:
    """The times of all steps, from those of each process in each batch of steps."""
    steps: list[dict[str, float]] = []
    for each in batches:
        for index in range(len(each[0].step.milliseconds)):
            slowest = max(each, key=lambda times: times.step.milliseconds[index])
            steps.append({name: times.milliseconds[index] for name, times in slowest.phases.items()})
    peaks = [[times.memory.peak_bytes for times in of_rank] for of_rank in zip(*batches, strict=True)]
    return GroupTimes(
        step=RoundTimes(tuple(sum(step.values()) for step in steps)),
        phases={name: RoundTimes(tuple(step[name] for step in steps)) for name in steps[0]},
        host_bound=any(times.is_host_bound for each in batches for times in each),
        peak_bytes_of_each=[max((peak for peak in each if peak is not None), default=None) for each in peaks],
    )


def time_together(
    phases: Mapping[str, Phase],
    layout: Layout,
    *,
    steps: int,
    most_steps: int,
    warmup: int,
    between: Phase | None = None,
) -> GroupTimes:
    """Time steps that all processes take at the same time; arguments are those of `time_steps`.

    All processes decide from the same times whether the median is precise, so that they take as many steps. Raises
    ValueError as `time_steps`.
    """
    batches: list[list[StepTimes]] = []
    while True:
        times = time_steps(phases, device=layout.device, steps=steps, warmup=1 if batches else warmup, between=between)
        batches.append(layout.all_gather(times))
        found = slowest_of(batches)
        if found.step.is_precise or (len(batches) + 1) * steps > most_steps:
            return found


def unsupported(reason: str | None) -> Outcome | None:
    """The outcome of a case that is not tried; None without a reason."""
    return Outcome(Status.UNSUPPORTED, reason) if reason else None
