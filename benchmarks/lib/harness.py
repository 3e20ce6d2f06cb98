"""The harness of all benchmarks: cases, each measured in a separate process, whose rows are stored as they come.

A program defines its cases as a frozen dataclass, a function that measures one of them, and the tables of all rows;
`run` does the rest: --filter, --dry-run and --resume, isolation, time limits, progress, results.csv, tables.md and
plots. docs/benchmarking.md has an example.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pandas as pd
import torch
from tqdm import tqdm

from benchmarks.lib.comparison import Comparison, Context, DeviceLostError, ran_out_of_memory, timing_method
from benchmarks.lib.intervals import pooled
from benchmarks.lib.isolation import Finished, run_isolated, termination_as_interruption
from benchmarks.lib.results import CSV, JSON, Outcome, Row, RowStore, Status, error, outcome_of
from benchmarks.lib.tables import markdown, page, summary
from cs336_systems.files import write_text
from cs336_systems.profiling.environment import Environment, collect_environment

__all__ = ["Case", "Comparison", "Context", "Outcome", "Program", "Row", "Status", "Sweep", "run"]
__all__ += ["ran_out_of_memory", "timing_method"]
_START_SECONDS = 300.0
STAMP = ("visit", "case_s", "device", "torch", "triton", "cuda", "driver", "seed", "commit", "dirty", "date")
"""The last columns of every row: which of --visits it is of, the seconds that its case took, and what it was measured
with."""


@dataclass(frozen=True)
class Case:
    """One configuration to measure. A subclass is a frozen dataclass with a field for each property of the case."""

    @property
    def columns(self) -> Row:
        """The first columns of the case's rows: its fields. Override it if a field is not a JSON value."""
        return dataclasses.asdict(self)

    @property
    def name(self) -> str:
        """The case in one line, unique in a run: what --dry-run lists, --filter searches and --resume recognises."""
        return " ".join(f"{name}={value}" for name, value in self.columns.items())


CaseT = TypeVar("CaseT", bound=Case)
Measure = Callable[[CaseT, Context], "Row | list[Row]"]


@dataclass(frozen=True)
class Program(Generic[CaseT]):
    """A benchmark.

    Attributes:
        name: of its file, without .py.
        title: of its tables.
        measure: measures a case in a separate process, and returns its row or rows: the columns of figures, and
            `status` and `reason` unless all is well. An exception becomes a row with a status. The columns of the case
            and `STAMP` are added. It must be a function of a module. The folder of the results is ``options.out``.
        tables: Markdown, from a DataFrame of all rows.
        plots: draws plots into a folder, from the same DataFrame.
        settings: names of options that must be the same for all rows of a folder, besides device and versions.
        notes: how it is measured, in sentences for the tables; `str.format` replaces names of options in braces.
        memory: bytes of device memory that a case needs at least, for --dry-run; None if unknown.
        packages: distributions whose versions belong to the environment.
        preload: modules that every case imports, for example `COMPILER` of `profiling.torch_names` for torch.compile.
        isolated: false if ``measure`` itself starts the processes that compute, and may run in this one.
    """

    name: str
    title: str
    measure: Measure[CaseT]
    tables: Callable[[pd.DataFrame], str] = markdown
    plots: Callable[[pd.DataFrame, Path], object] | None = None
    settings: tuple[str, ...] = ("seed",)
    notes: tuple[str, ...] = ()
    memory: Callable[[CaseT, argparse.Namespace], int | None] = lambda case, options: None
    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    isolated: bool = True


class Sweep(Generic[CaseT]):
    """The cases of a run. `rows` measures a case when it is first called for it, and stores its rows."""

    def __init__(self, program: Program[CaseT], options: argparse.Namespace, cases: Sequence[CaseT]) -> None:
        """Open the folder of the results. Raises ValueError if it cannot take the rows of this run."""
        self.environment = environment = environment_of(options, program)
        self.folder: Path = options.out or default_folder(program.name, environment.device)
        # Measuring functions may write files there.
        self.program, self.options = program, argparse.Namespace(**vars(options) | {"out": self.folder})
        settings = {name: getattr(options, name) for name in program.settings} | environment.packages
        settings |= {"device": environment.device, "torch": environment.torch, "triton": environment.triton}
        self._store = RowStore(self.folder, settings, resume=options.resume)
        environment.write(self.folder / "environment.json")
        self.visit = 1
        visits = range(1, options.visits + 1)
        stored = sum(_visited(case, visit) in self._store for visit in visits for case in cases)
        self._progress = tqdm(total=len(cases) * len(visits), initial=stored, unit="case", disable=None)

    @property
    def frame(self) -> pd.DataFrame:
        """All rows, those of earlier runs in the folder too."""
        return pd.DataFrame(self._store.rows)

    def rows(self, case: CaseT) -> list[Row]:
        """The rows of a case in this visit, measured now unless they are stored."""
        visited = _visited(case, self.visit)
        if visited not in self._store:
            self._progress.set_description(visited)
            begin = time.monotonic()
            measured = self._measure(case)
            last = {"visit": self.visit, "case_s": round(time.monotonic() - begin, 1), "seed": self.options.seed}
            last |= vars(self.environment)
            stamp = {name: last[name] for name in STAMP}
            rows = [{"case": case.name, **case.columns, **row, **stamp} for row in measured]
            self._store.append(visited, rows)
            self.note(f"{visited}: {summary(rows)}")
            self._progress.update()
        return self._store[visited]

    def note(self, text: str) -> None:
        """Print a line that stays above the progress bar."""
        self._progress.write(text, file=sys.stderr)

    def write(self) -> None:
        """`write_results` of all rows."""
        self._progress.close()
        write_results(self.program, self.options, self._store.rows, self.environment)

    def _measure(self, case: CaseT) -> list[Row]:
        context, measure = Context(self.options, self._store.rows), self.program.measure
        if not self.program.isolated:
            return measure_here(measure, case, context)
        finished = run_excluding(
            measure_here,
            measure,
            case,
            context=context,
            limit=self.options.timeout,
            preload=self.program.preload,
            on_step=lambda provider, text: self._progress.set_postfix_str(f"{provider} {text}"),
        )
        return [error(finished.failure).columns] if finished.failure else finished.result


def write_results(
    program: Program[Any], options: argparse.Namespace, rows: Sequence[Row], environment: Environment
) -> None:
    """Write results.json, with the rows as results.csv has them, and tables.md, and draw the plots, in the folder
    ``options.out``."""
    if not rows:
        return
    folder, frame = options.out, pooled(pd.DataFrame(rows))
    write_text(folder / JSON, json.dumps(rows, indent=1) + "\n")
    notes = [note.format(**vars(options)) for note in program.notes]
    if "tf32" in program.settings:
        notes.append(f"float32 products {'may' if options.tf32 else 'do not'} use TF32")
    missing = getattr(options, "missing", {})
    notes += [f"not measured: {name} ({reason})" for name, reason in missing.items()]
    if options.visits > 1:
        notes.append(f"{options.visits} visits: the median of theirs, in the widest of their intervals")
    text = page(program.title, environment, notes, program.tables(frame), frame)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    if options.plots and program.plots is not None:
        program.plots(frame, folder)
    print(f"wrote {folder / 'tables.md'}")


def _visited(case: Case, visit: int) -> str:
    """A case in one of the visits, in one line: what --resume recognises."""
    return case.name if visit == 1 else f"{case.name} visit={visit}"


def run_excluding(function: Callable[..., Any], *arguments: Any, context: Context, **how: Any) -> Finished:
    """`run_isolated` of ``function(*arguments, context)``, again without each provider that ends the process."""
    while True:
        finished = run_isolated(function, *arguments, context, **how)
        if not finished.failure or not finished.provider or finished.provider in context.excluded:
            return finished
        context = dataclasses.replace(context, excluded={**context.excluded, finished.provider: finished.failure})


def measure_here(measure: Measure[CaseT], case: CaseT, context: Context) -> list[Row]:
    """Measure a case in this process, with the settings of torch that the options name.

    An exception is a row, but for DeviceLostError.
    """
    options = context.options
    if options.device.type == "cuda" and options.device.index is not None:
        torch.cuda.set_device(options.device)
    if hasattr(options, "tf32"):
        torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    torch.manual_seed(options.seed)
    try:
        measured = measure(case, context)
    except DeviceLostError:
        raise
    except Exception as exception:
        measured = outcome_of(exception).columns
    rows = measured if isinstance(measured, list) else [measured]
    return [Outcome().columns | row for row in rows]


def environment_of(options: argparse.Namespace, program: Program[Any]) -> Environment:
    """The environment, read in a separate process, so that this one takes no memory of the GPU.

    Raises RuntimeError if it cannot be read.
    """
    read = functools.partial(collect_environment, packages=program.packages, commit=options.commit)
    finished = run_isolated(read, options.device, limit=_START_SECONDS, preload=program.preload)
    if finished.failure:
        raise RuntimeError(f"the environment of {options.device} cannot be read: {finished.failure}")
    return finished.result


def default_folder(program: str, device_name: str) -> Path:
    """The folder of a new run: results/<program>/<device>-<date and time>."""
    device = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path("results") / program / f"{device}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"


def run(
    program: Program[CaseT],
    options: argparse.Namespace,
    cases: Sequence[CaseT],
    drive: Callable[[Sweep[CaseT], list[CaseT]], object] = lambda sweep, cases: [*map(sweep.rows, cases)],
) -> int:
    """Run a benchmark; the exit status is 0, 1 if every row is an error, 2 for invalid input, or 130 when interrupted.

    Args:
        options: as `flags.parse` returns them.
        cases: all that the options name; --filter chooses among them.
        drive: calls `Sweep.rows` for the cases, if another order or choice is needed than one after the other.
    """
    try:
        if options.redraw is not None:
            redraw(program, options.redraw)
            return 0
        chosen = [case for case in cases if options.filter is None or options.filter.search(case.name)]
        if options.filter is not None and not chosen:
            example = f", for example {cases[0].name!r}" if cases else ""
            raise ValueError(f"--filter must match the name of a case{example}; got {options.filter.pattern!r}")
        if options.dry_run:
            for case in chosen:
                size = program.memory(case, options)
                print(case.name + ("" if size is None else f": {size / 2**30:.2f} GiB"))
            print(f"{len(chosen)} cases")
            return 0
        sweep = Sweep(program, options, chosen)
    except (ValueError, RuntimeError, FileNotFoundError) as exception:
        print(f"{program.name}.py: error: {exception}", file=sys.stderr)
        return 2
    sweep.note(f"results: {sweep.folder}")
    try:
        with termination_as_interruption():
            for sweep.visit in range(1, options.visits + 1):
                drive(sweep, chosen)
    except KeyboardInterrupt:
        sweep.note(f"interrupted; the same command with --out {sweep.folder} --resume continues")
        return 130
    finally:
        sweep.write()
    return int((sweep.frame["status"] == Status.ERROR.value).all())


def redraw(program: Program[Any], folder: Path) -> None:
    """Draw the plots of a folder again from its results.csv. Raises ValueError without results or plots."""
    if program.plots is None:
        raise ValueError(f"--redraw must name a benchmark with plots; {program.name} has none")
    if not (folder / CSV).exists():
        raise ValueError(f"--redraw must name a folder with a {CSV}; got {folder}")
    program.plots(pooled(pd.read_csv(folder / CSV)), folder)
