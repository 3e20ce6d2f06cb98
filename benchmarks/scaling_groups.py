"""Groups of processes, each of which measures one row: started by torchrun, ended whatever happens, and heard."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.scaling_cell import FAILURE, RESULT, Cell, Job
from benchmarks.suite import columns_of_failure, failed
from cs336_systems.parallel.layout import NONE
from cs336_systems.profiling.sweep import Row, Status

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ("-m", "benchmarks.scaling_cell")
"""What each process runs, with the job as its argument."""
_SECONDS_TO_END = 45.0
"""torchrun gives its processes 30 s before it kills them; killed itself, it would leave them behind."""


def command_of(job: Job, program: Sequence[str] = PROGRAM) -> list[str]:
    """The command that starts a job's processes: torchrun's, or for a process alone Python's.

    They meet at an address that needs no name to be resolved, and at a port that is free.
    """
    cell, python = job.cell, [sys.executable]
    if cell.mode != NONE:
        python += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        python += ["--nproc-per-node", str(cell.processes)]
    return [*python, *program, job.as_json()]


def environment_of_processes() -> dict[str, str]:
    """This process's variables; the checkout is importable, and every process has one thread for itself, as torchrun
    has it, so that one process alone is measured as each of several."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}


def log_of(cell: Cell, folder: Path) -> Path:
    """The file for what the processes of a cell print."""
    slug = re.sub(r"[^a-z0-9.]+", "-", cell.key.replace("×", "x").lower()).strip("-")
    return folder / "logs" / f"{slug}.txt"


def run_group(job: Job, limit: float, log: Path, program: Sequence[str] = PROGRAM) -> Row:
    """The columns of a job's row, measured by a group of processes which is gone when this returns.

    Args:
        job: what they do; its folder is set here.
        limit: seconds after which they are ended.
        log: where what they print goes.
        program: what each runs.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        job = dataclasses.replace(job, folder=folder)
        late = False
        with log.open("wb") as output:
            process = subprocess.Popen(
                command_of(job, program),
                cwd=ROOT,
                env=environment_of_processes(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end(process)
        said = _said(Path(folder), job.cell.processes)
    if said is not None:
        return said
    if late:
        return columns_of_failure(failed(f"took longer than {limit:g} s"))
    last = log.read_text(errors="replace").split("\n")[-12:]
    return columns_of_failure(failed(f"ended with status {process.returncode}: {' '.join(last)}"))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _said(folder: Path, processes: int) -> Row | None:
    """What the processes wrote: the result, or why there is none; None if they were ended before they could."""
    if (folder / RESULT).exists():
        result: Row = json.loads((folder / RESULT).read_text())
        return result
    paths = [folder / FAILURE.format(rank) for rank in range(processes)]
    failures: list[Row] = [json.loads(path.read_text()) for path in paths if path.exists()]
    # Where memory runs out in one process, others may fail because it is gone.
    failures.sort(key=lambda failure: failure["status"] != Status.OUT_OF_MEMORY.value)
    return failures[0] if failures else None
