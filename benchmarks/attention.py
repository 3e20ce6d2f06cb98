"""The main benchmark: attention over lengths and head dimensions, for every implementation, in time and in memory.

    python benchmarks/attention.py --help

One cell is one problem. All implementations are measured in it together, interleaved, when the first of its figures is
asked for; the sweep itself is driven by `triton.testing.perf_report`. docs/benchmarking.md says what is measured, and
why in this way.
"""

from __future__ import annotations

import datetime
import importlib.util
import re
import signal
import site
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if not __package__:
    # Run as a script: let it find `benchmarks` and the library beside it in this checkout, installed or not.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.attention_cell import CellRun, CellSettings
from benchmarks.attention_guards import SeriesHistory
from benchmarks.attention_options import RunOptions, parse
from benchmarks.attention_peers import PEER_DISTRIBUTIONS
from benchmarks.attention_plan import Plan, dry_run, headline, method_notes
from benchmarks.attention_presets import Problem, SweepConfiguration
from benchmarks.attention_providers import all_providers
from benchmarks.attention_report import Report, draw
from benchmarks.attention_rows import RowMaker, rows_from_csv, summary
from cs336_systems.kernels.torch_names import without_donated_buffers
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.memory import release_memory
from cs336_systems.profiling.progress import Progress
from cs336_systems.profiling.sweep import DeathLog, Row, RowStore

NOT_A_NUMBER = float("nan")

# One may have been the machine, or whoever ended the process.
_DEATHS_ALLOWED = 2


class SweepStoppedError(RuntimeError):
    """The sweep cannot go on in this process; what was measured is stored."""


class Sweep:
    """Measures cells when their figures are asked for, and stores each cell when it is finished."""

    def __init__(self, plan: Plan, environment: Environment, store: RowStore, progress: Progress) -> None:
        self._plan = plan
        self._store = store
        self._progress = progress
        self._maker = RowMaker(plan.configuration, environment, plan.device)
        self._history = SeriesHistory(store.rows)
        self._deaths = DeathLog(store.folder)
        self._noted: set[str] = set()
        self._settings = CellSettings(
            device=plan.device,
            passes=plan.configuration.passes,
            method=plan.method,
            max_seconds=plan.configuration.max_seconds,
            seed=plan.configuration.seed,
        )
        self._problems = {(p.dtype, p.mask, p.head_dim, p.length): p for p in plan.problems}

    def figures(self, dtype: str, mask: str, head_dim: int, length: int, provider: str, metric: str) -> Sequence[float]:
        """A figure for `perf_report`, as median, minimum and maximum; not-a-numbers where there is none."""
        for row in self.rows_of(self._problems[dtype, mask, head_dim, length]):
            if (row["implementation"], row["pass"]) == (provider, metric) and row["median_ms"] is not None:
                return row["median_ms"], row["min_ms"], row["max_ms"]
        return (NOT_A_NUMBER,) * 3

    def rows_of(self, problem: Problem) -> list[Row]:
        """The rows of a cell, measured now if they are not stored. Raises SweepStoppedError when the device is lost."""
        if not self._store.is_finished(problem.key):
            self._measure(problem)
        return self._store.rows_of(problem.key)

    def _measure(self, problem: Problem) -> None:
        self._progress.start_cell(problem.key)
        if any(provider.compiles for provider in self._plan.providers):
            # A second shape would make the compiler try dynamic shapes, and a ninth leave the function uncompiled.
            torch.compiler.reset()

        def on_step(name: str, what: str) -> None:
            self._deaths.begin(_attempt(problem, name))
            self._progress.step(f"{name}: {what}")

        def condemned(name: str) -> str | None:
            deaths = self._deaths.deaths(_attempt(problem, name))
            return f"{deaths} processes ended while it ran here" if deaths >= _DEATHS_ALLOWED else None

        try:
            result = CellRun(problem, self._settings, self._history, on_step, condemned).measure(self._plan.providers)
        finally:
            self._deaths.end()
        rows = self._maker.rows(problem, self._plan.providers, result)
        self._store.append(problem.key, rows)
        for row in rows:
            self._history.add(row)
        self._progress.finish_cell(summary(rows))
        warned = [f"{row['implementation']}: {row['warning']}" for row in rows if row["warning"]]
        for text in dict.fromkeys([*result.warnings, *warned]):
            kind = re.sub(r"\d", "", text)  # the same in other numbers is no news
            if kind not in self._noted:
                self._noted.add(kind)
                self._progress.note(f"  note: {text}")
        if result.device_lost:
            raise SweepStoppedError("the device was lost; the cell is stored, so --resume goes on with the next one")
        release_memory(self._plan.device)


def _attempt(problem: Problem, name: str) -> str:
    return f"{problem.key}: {name}"


def drive(sweep: Sweep, plan: Plan) -> None:
    """Go through the whole sweep with `triton.testing.perf_report`, and print each of its tables.

    Where Triton does not exist (it has no wheels for some systems) the same cells are measured in the same order.
    """
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: the sweep runs without its perf_report, and prints no tables.")
        for problem in plan.problems:
            sweep.rows_of(problem)
        return
    from triton.testing import Benchmark, perf_report

    configuration = plan.configuration
    names = [provider.name for provider in plan.providers]
    for dtype, mask, head_dim in dict.fromkeys((p.dtype, p.mask, p.head_dim) for p in plan.problems):
        group = [p for p in plan.problems if (p.dtype, p.mask, p.head_dim) == (dtype, mask, head_dim)]
        benchmarks = [
            Benchmark(
                x_names=["length"],
                x_vals=sorted(problem.length for problem in group),
                line_arg="provider",
                line_vals=names,
                line_names=names,
                plot_name="",  # no plots from here: it leaves its figures open, and ours show all dimensions at once
                ylabel="ms",
                args={"dtype": dtype, "mask": mask, "head_dim": head_dim, "metric": which},
            )
            for which in configuration.passes
        ]
        frames = perf_report(benchmarks)(sweep.figures).run(return_df=True)
        for which, frame in zip(configuration.passes, frames, strict=True):
            table = frame.astype({"length": int}).rename(columns=lambda name: name.replace(" (ms)", ""))
            print(f"\n{which}, ms: {dtype}, {mask}, d {head_dim}")
            print(table.to_string(index=False, na_rep="–", float_format="{:.4g}".format))


def default_folder(device_name: str) -> Path:
    """A folder for a new sweep, by device and time."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return Path("results") / "attention" / f"{slug}-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"


def run(plan: Plan, options: RunOptions) -> int:
    """Measure, and write the results, also when it is interrupted; the program's exit status."""
    environment = collect_environment(plan.device, packages=PEER_DISTRIBUTIONS, commit=options.commit)
    folder = options.folder or default_folder(environment.device)
    store = RowStore.open(folder, plan.as_dict(environment))
    environment.write(folder / "environment.json")
    progress = Progress(len(plan.problems))
    for problem in plan.problems:
        if store.is_finished(problem.key):
            progress.keep_cell()
    progress.note(f"results: {folder}")
    if plan.device.type == "cpu" and (environment.load_average or 0) > environment.cpu_threads / 2:
        progress.note(f"note: the load average is {environment.load_average:.1f}: other programs make these times long")
    status = 0
    try:
        with termination_as_interruption():
            drive(Sweep(plan, environment, store, progress), plan)
    except KeyboardInterrupt:
        progress.note(f"interrupted; finished cells are kept, go on with --resume {folder}")
        status = 130
    except SweepStoppedError as error:
        progress.note(str(error))
        status = 3
    report = Report(store.rows, environment, plan.missing, method_notes(plan))
    for path in report.write(folder, plots=options.plots):
        progress.note(f"wrote {path}")
    return status


@contextmanager
def termination_as_interruption() -> Iterator[None]:
    """Let what a time limit sends (SIGTERM) end the sweep as Ctrl-C does: with its tables written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say what signals do
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def torch_settings(configuration: SweepConfiguration, device: torch.device) -> Iterator[None]:
    """The process-wide settings of torch that the sweep needs, for as long as it runs."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if configuration.tf32 else "highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        # A compiled backward may otherwise overwrite what it was given, and then cannot run again on the same graph.
        with without_donated_buffers():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 0, 2 for what cannot be done, 3 for a lost device, 130 when interrupted."""
    configuration, options = parse(arguments)
    if options.peers is not None:
        site.addsitedir(str(options.peers))
    for module in ("matplotlib", "pandas"):
        if importlib.util.find_spec(module) is None:
            print(f"attention.py needs {module}: pip install 'cs336_systems[bench]'", file=sys.stderr)
            return 2
    if options.redraw is not None:
        for path in draw(options.redraw, rows_from_csv(options.redraw / "results.csv")):
            print(f"wrote {path}")
        return 0
    try:
        with torch_settings(configuration, options.device):
            plan = Plan.make(configuration, options.device, all_providers(options.device), options.filter)
            print("\n".join(headline(plan)))
            if options.dry_run:
                print("\n".join(dry_run(plan)))
                return 0
            return run(plan, options)
    except ValueError as error:
        print(f"attention.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
