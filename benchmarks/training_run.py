"""What the benchmarks of training have in common: options, the environment, and rows that are stored as they come."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.processes import run_jobs
from benchmarks.training_models import names_of
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.progress import Progress, readable_seconds
from cs336_systems.profiling.report import format_number
from cs336_systems.profiling.sweep import Outcome, Row, RowStore, Status
from cs336_systems.transformer import PRESETS
from cs336_systems.transformer.presets import VOCAB_SIZE

TOKENS = 16384
"""Of a step, on one process, unless something else is asked for."""
_START_SECONDS = 300.0


class HasKey(Protocol):
    """A cell: what a row is measured of."""

    @property
    def key(self) -> str:
        """The cell in words, which no other has."""
        ...


def add_model_options(parser: argparse.ArgumentParser, presets: Sequence[str], contexts: Sequence[int]) -> None:
    """Which models, and with how much work."""
    add = parser.add_argument
    add("--preset", nargs="+", default=[*presets], metavar="NAME", help="default: %(default)s")
    add("--suite", default="2025", choices=PRESETS, help="that presets belong to (default: %(default)s)")
    add("--vocab-size", type=positive, default=VOCAB_SIZE, metavar="N", help="default: %(default)s")
    add("--context", nargs="+", type=positive, default=[*contexts], metavar="N", help="default: %(default)s")


def add_run_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """How it is measured, and where results go."""
    add = parser.add_argument
    add("--steps", type=positive, default=10, metavar="N", help="that are timed (default: %(default)s)")
    add("--warmup", type=positive, default=3, metavar="N", help="before them; the first compiles (%(default)s)")
    add("--no-tf32", dest="tf32", action="store_false", help="keep products of float32 from TF32")
    add("--seed", type=int, default=0, help="of parameters and tokens (default: %(default)s)")
    add("--limit", type=float, default=600, metavar="S", help="seconds for a row, its start included (%(default)g)")
    add("--output", type=Path, default=Path(folder), metavar="FOLDER", help="default: %(default)s")
    add("--resume", action="store_true", help="measure what the output folder does not have yet")
    add("--commit", help="the commit to record where the checkout is not in a git repository")


def check_presets(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where a preset is none of the suite's."""
    for name in options.preset:
        if name not in names_of(options.suite):
            known = ", ".join(names_of(options.suite))
            parser.error(f"--preset must be one of {known} with --suite {options.suite}; got {name}")


def positive(text: str) -> int:
    """A number of the command line that is at least 1. Raises argparse.ArgumentTypeError for others."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return number


def environment_of(device: torch.device, commit: str | None) -> Environment:
    """The environment, read in a process that ends: this one takes no memory of the GPU that is measured.

    Raises:
        RuntimeError: it cannot be read; the message says why.
    """
    read = functools.partial(collect_environment, packages=("transformers",), commit=commit)
    (finished,) = run_jobs(read, [device], processes=1, seconds_each=_START_SECONDS)
    if finished.failure:
        raise RuntimeError(f"the environment of {device} cannot be read: {finished.failure}")
    environment: Environment = finished.result
    return environment


def shared_configuration(options: argparse.Namespace, environment: Environment) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {
        "steps": options.steps,
        "warmup": options.warmup,
        "tf32": options.tf32,
        "seed": options.seed,
        "device": environment.device,
        "torch": environment.torch,
        "triton": environment.triton,
        **environment.packages,
    }


def opened(options: argparse.Namespace, configuration: dict[str, Any]) -> RowStore:
    """The folder's rows, or none unless they are wanted. Raises ConfigurationMismatchError for those of another run."""
    open_store = RowStore.open if options.resume else RowStore.begin
    return open_store(options.output, configuration)


class Rows:
    """The rows of a run: each is measured where it is not stored, then stored, and everything written anew.

    Args:
        store: those that there are.
        measure: the columns of a cell's row.
        write: writes the files for people.
        total: how many cells there will be; None where each depends on the one before.
        environment: of the run; its commit and date stand in every row.
    """

    def __init__(
        self,
        store: RowStore,
        measure: Callable[[Any], Row],
        write: Callable[[], None],
        total: int | None,
        environment: Environment,
    ) -> None:
        self._store, self._measure, self._write = store, measure, write
        self._stamp = {"device": environment.device, "commit": environment.commit, "date": environment.date}
        self._counted = total is not None
        self.progress = Progress(total or 0)

    def of(self, cell: HasKey) -> Row:
        """The row of a cell."""
        if self._store.is_finished(cell.key):
            self.progress.keep_cell()
            return self._store.rows_of(cell.key)[0]
        if self._counted:
            self.progress.start_cell(cell.key)
        begin = time.monotonic()
        row = self._measure(cell)
        row |= {"row_s": round(time.monotonic() - begin, 1), **self._stamp}
        self._store.append(cell.key, [row])
        self._write()
        if self._counted:
            self.progress.finish_cell(_summary(row))
        else:
            self.progress.note(f"{cell.key}: {_summary(row)}")
        return row


def failed(reason: str) -> Outcome:
    """The outcome of a row whose process, or group of them, did not say what happened."""
    return Outcome(Status.ERROR, " ".join(reason.split())[:300])


def _summary(row: Row) -> str:
    took = f"the row took {readable_seconds(row['row_s'])}"
    if row["status"] != Status.OK.value:
        return f"{row['status']}, {took} ({row['reason'][:120]})"
    compiling = row.get("compile_s")
    first = "" if compiling is None else f", the first step {format_number(compiling)} s more"
    return f"{format_number(row['median_ms'])} ms a step{first}, {took}"
