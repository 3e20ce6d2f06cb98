"""What benchmarks of whole models have in common: cells that are measured each by itself, and stored as they come.

A program says what its cells are and how one is measured (`Tool`), and `run` does the rest: it lists them with
--dry-run, chooses among them with --filter, measures each in a process of its own, goes on where an earlier run stopped
with --resume, and writes the files for people after each row, so that an interruption loses no finished one.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from benchmarks.cell_filter import HELP, CellT, check_filter, chosen
from benchmarks.isolation import termination_as_interruption
from benchmarks.processes import module_of, run_jobs
from benchmarks.suite_rows import Rows
from cs336_systems.devices import choose_device
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.memory import GIB
from cs336_systems.profiling.progress import readable_seconds
from cs336_systems.profiling.report import format_number
from cs336_systems.profiling.sweep import ConfigurationMismatchError, Outcome, Row, RowStore, Status, outcome_of

_START_SECONDS = 300.0


Found = TypeVar("Found")


@dataclass(frozen=True)
class Estimate:
    """What a cell is expected to take, from its sizes alone: seconds, and bytes of the device; None where unknown."""

    seconds: float | None = None
    bytes: int | None = None


def _nothing_skipped(cell: Any, rows: Sequence[Row]) -> Outcome | None:
    return None


def _nothing_drawn(folder: Path, rows: Sequence[Row]) -> None:
    return None


def _unknown(cell: Any) -> Estimate:
    return Estimate()


@dataclass(frozen=True)
class Tool(Generic[CellT]):
    """A program that measures cells.

    Attributes:
        program: the name of its file.
        measure: the columns of a cell's row, from (cell, conditions); a function of a module, for another process.
            What cannot be measured is a status among them: see `columns_of_failure`. A list of them is several rows.
        conditions: how cells are measured, the same for all.
        finish: a whole row, from a cell and those columns, or those of a failure.
        write: writes the files for people, from all rows that there are.
        draw: draws plots of them, once, at the end.
        configuration: what rows must have in common to stand in one table, beside the environment.
        skip: why a cell is not tried, from the rows before it; None if it is.
        estimate: for --dry-run.
        packages: whose versions are part of the environment.
        preload: modules that ``measure`` imports while it runs, if at all: see `run_jobs`.
    """

    program: str
    measure: Callable[[tuple[CellT, Any]], Row | list[Row]]
    conditions: Any
    finish: Callable[[CellT, Row, Environment], Row]
    write: Callable[[Path, Sequence[Row], Environment], None]
    configuration: dict[str, Any]
    skip: Callable[[CellT, Sequence[Row]], Outcome | None] = _nothing_skipped
    estimate: Callable[[CellT], Estimate] = _unknown
    draw: Callable[[Path, Sequence[Row]], object] = _nothing_drawn
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """All that a row's process has imported when it begins."""
        return (module_of(self.measure), *self.preload)


def add_run_options(parser: argparse.ArgumentParser, folder: str, *, chooses_device: bool = True) -> None:
    """Which of the cells are measured, on what, and where results go. After parsing, see `check_run_options`."""
    add = parser.add_argument
    if chooses_device:
        add("--device", default="auto", help="cuda, cuda:1, mps or cpu (default: a GPU where there is one)")
    add("--seed", type=int, default=0, help="of random numbers (default: %(default)s)")
    add("--limit", type=float, default=600, metavar="S", help="seconds for a row, its start included (%(default)g)")
    add("--output", type=Path, default=Path(folder), metavar="FOLDER", help="default: %(default)s")
    add("--resume", action="store_true", help="measure what the output folder does not have yet")
    add("--filter", metavar="REGEX", help=HELP)
    add("--dry-run", action="store_true", help="list what would be measured, with an estimate of time and memory")
    add("--commit", help="the commit to record where the checkout is not in a git repository")


def check_run_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Make a torch.device of --device, and a pattern of --filter; end the program where that cannot be done."""
    try:
        options.device = choose_device(options.device)
    except ValueError as error:
        parser.error(str(error))
    check_filter(parser, options)


def positive(text: str) -> int:
    """A number of the command line that is at least 1. Raises argparse.ArgumentTypeError for others."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return number


def environment_of(
    device: torch.device, commit: str | None, packages: Sequence[str] = (), preload: Sequence[str] = ()
) -> Environment:
    """The environment, read in a process that ends: this one takes no memory of the GPU that is measured.

    With what later jobs ``preload`` it begins as they do, and nothing is imported twice.

    Raises:
        RuntimeError: it cannot be read; the message says why.
    """
    read = functools.partial(collect_environment, packages=tuple(packages), commit=commit)
    (finished,) = run_jobs(read, [device], processes=1, seconds_each=_START_SECONDS, preload=preload)
    if finished.failure:
        raise RuntimeError(f"the environment of {device} cannot be read: {finished.failure}")
    environment: Environment = finished.result
    return environment


def with_environment(configuration: dict[str, Any], environment: Environment) -> dict[str, Any]:
    """What rows must have in common to stand in one table: settings, device, and versions."""
    return configuration | {
        "device": environment.device,
        "torch": environment.torch,
        "triton": environment.triton,
        **environment.packages,
    }


def opened(options: argparse.Namespace, configuration: dict[str, Any]) -> RowStore:
    """The folder's rows, or none unless they are wanted. Raises ConfigurationMismatchError for those of another run."""
    open_store = RowStore.open if options.resume else RowStore.begin
    return open_store(options.output, configuration)


def columns_of_failure(outcome: Outcome) -> Row:
    """The columns of a row without figures."""
    return {"status": outcome.status.value, "reason": outcome.reason}


def failed(reason: str) -> Outcome:
    """The outcome of a row whose process, or group of them, did not say what happened."""
    return Outcome(Status.ERROR, " ".join(reason.split())[:300])


def measured_alone(measure: Callable[[Any], Row | list[Row]], job: Any, limit: float) -> Row | list[Row]:
    """What a function returns for a job in a process of its own, which has ``limit`` seconds, and ends with it."""
    (finished,) = run_jobs(measure, [job], processes=1, seconds_each=limit)
    if finished.failure:
        return columns_of_failure(failed(finished.failure))
    found: Row | list[Row] = finished.result
    return found


def allow_tf32(allowed: bool) -> None:
    """Whether products of float32 may use TF32, for all that this process does."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def columns_here(
    measure: Callable[[], Found],
    *,
    device: torch.device,
    tf32: bool,
    refusal: Callable[[], str | None] | None = None,
) -> Found | Row:
    """What ``measure`` returns, in this process, which is the cell's own; a status where it raises.

    Or where ``refusal`` says why the cell cannot be measured.
    """
    try:
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
        allow_tf32(tf32)
        reason = None if refusal is None else refusal()
        if reason is not None:
            return columns_of_failure(Outcome(Status.UNSUPPORTED, reason))
        return measure()
    except Exception as error:
        return columns_of_failure(outcome_of(error))


def run(tool: Tool[CellT], options: argparse.Namespace, cells: Sequence[CellT]) -> int:
    """Measure the cells; the exit status is 0, 2 for what cannot be done, 130 when interrupted.

    ``options`` have those of `add_run_options`, after `check_run_options`.
    """
    cells = chosen(cells, options.filter)
    if options.dry_run:
        print(listing(cells, tool.estimate))
        return 0
    try:
        environment = environment_of(options.device, options.commit, tool.packages, tool.modules)
        store = opened(options, with_environment(tool.configuration, environment))
    except (ConfigurationMismatchError, RuntimeError) as error:
        print(f"{tool.program}: error: {error}", file=sys.stderr)
        return 2
    environment.write(options.output / "environment.json")

    def measure(cell: CellT) -> list[Row]:
        skipped = tool.skip(cell, store.rows)
        job = (cell, tool.conditions)
        found = columns_of_failure(skipped) if skipped else measured_alone(tool.measure, job, options.limit)
        return [tool.finish(cell, columns, environment) for columns in (found if isinstance(found, list) else [found])]

    def write_all() -> None:
        tool.write(options.output, store.rows, environment)

    rows = Rows(store, measure, write_all, len(cells), environment)
    rows.progress.note(f"results: {options.output}")
    try:
        with termination_as_interruption():
            for cell in cells:
                rows.of(cell)
    except KeyboardInterrupt:
        rows.progress.note("interrupted; the same command with --resume goes on")
        return 130
    finally:
        write_all()
        tool.draw(options.output, store.rows)
    return 0


def listing(cells: Sequence[CellT], estimate: Callable[[CellT], Estimate] = _unknown) -> str:
    """A line for each cell with what it is expected to take, and one for all of them."""
    estimates = [estimate(cell) for cell in cells]
    lines = [f"{cell.key}: {_expected(expected)}" for cell, expected in zip(cells, estimates, strict=True)]
    known = [expected.seconds for expected in estimates if expected.seconds is not None]
    total = readable_seconds(sum(known)) if len(known) == len(cells) else "time unknown"
    return "\n".join([*lines, f"{len(cells)} rows, {total}"])


def _expected(estimate: Estimate) -> str:
    seconds = "time unknown" if estimate.seconds is None else readable_seconds(estimate.seconds)
    room = "memory unknown" if estimate.bytes is None else f"{format_number(estimate.bytes / GIB)} GiB"
    return f"{seconds}, {room}"
