"""Groups of processes that measure a case together: how they are started and ended, and how they time what they do.

Each process is an isolated call, so that it starts within milliseconds. torch.distributed finds the others by the
variables that torchrun sets. A group has always ended when its row is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.lib.harness import Case, Outcome, Row, Status
from benchmarks.lib.isolation import finish, map_isolated
from benchmarks.lib.models import file_of
from benchmarks.lib.results import error, outcome_of
from cs336_systems.parallel import Layout, start
from cs336_systems.parallel.layout import NONE
from cs336_systems.profiling.steps import Phase, StepTimes, time_steps
from cs336_systems.profiling.timing import RoundTimes

CaseT = TypeVar("CaseT", bound=Case)
Measure = Callable[[CaseT, Namespace, Layout], Row]

_SECONDS_FOR_THE_CAUSE = 2.0


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


def run_group(measure: Measure[CaseT], case: CaseT, processes: int, mode: str, options: Namespace) -> Row:
    """The columns that a group of processes measures. The group has ended when this returns.

    The first process that fails ends the others, which wait for it, and gives the reason: an exception, a signal, or
    that it exceeded the ``timeout`` of the options. What the processes print is in logs/ of the results.

    Args:
        measure: the columns of the case, in each process; those of rank 0 are returned. A function of a module.
        processes: of the group; one has no group with mode "none".
        mode: how they share the work, one of `cs336_systems.parallel.MODES`.
        options: the command line.
    """
    log = file_of(options.out, "logs", case, "txt")
    log.unlink(missing_ok=True)
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(processes)}
    each = [same | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    jobs = [(measure, case, mode, options, variables if mode != NONE else {}, log) for variables in each]
    columns: Row = {}
    with contextlib.closing(map_isolated(_take_part, jobs, processes=processes, limit=options.timeout)) as ends:
        for _, finished in ends:
            row = error(finished.failure).columns if finished.failure else finished.result
            if "status" in row:
                return row
            columns |= row
    return columns


def _take_part(
    measure: Measure[CaseT], case: CaseT, mode: str, options: Namespace, variables: Mapping[str, str], log: Path
) -> Row:
    """Measure a case in a process of the group; the columns are those of rank 0, and none of the others.

    A process that fails does not leave the group: it would wait for the others there, and they for it in a step.
    """
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(variables)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does
    torch.set_float32_matmul_precision("high" if getattr(options, "tf32", False) else "highest")
    patience = None if mode == NONE else timedelta(seconds=options.timeout)
    with start(mode, torch.device(options.device.type), None, patience) as layout:
        try:
            row = measure(case, options, layout)
            layout.all_gather(None)  # no process leaves the group while another still communicates
        except Exception as exception:
            traceback.print_exc()
            time.sleep(_SECONDS_FOR_THE_CAUSE)  # a connection lost to a process that failed is not the row's reason
            finish(outcome_of(exception).columns)
    return row if layout.is_main else {}


def free_ports(count: int) -> list[int]:
    """Different ports of this machine on which nothing listens, below those of outgoing connections on Linux."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


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
