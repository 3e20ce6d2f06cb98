"""The cost of what attention can compute besides causality: time of each feature, ours and that of others.

    python benchmarks/features.py                                    # every case; short ones without a GPU
    python benchmarks/features.py --peers PEERS                      # with FlashAttention-4 from that folder
    python benchmarks/features.py --cases window_4096 document --dims 128 --length 32768

All contenders of a case and pass are measured in the same rounds, and beside them our plain causal attention of the
same sizes. The whole table is estimated to take 6 minutes on an H200 whose machine has 16 cores. First everything is
compiled in parallel processes; with --jobs 0 it is compiled when it is first called, which takes far longer. Each cell
is written when it is measured, and --resume goes on where a run stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Each case compiles a kernel or two at a time, for which a pool of 32 processes would only have to be started.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# FlashAttention-4 compiles anew in every process unless it is told to keep what it compiled.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

import torch

from benchmarks.asked_device import asks_for_gpu
from benchmarks.attention_providers import PEER_DISTRIBUTIONS
from benchmarks.feature_cases import CASES, OURS, PEERS
from benchmarks.feature_cells import BESIDE, PASSES, Cell, CellRun, Conditions, add_peers, first_call
from benchmarks.feature_peers import why_no_fa4
from benchmarks.feature_report import COLUMNS, report, rows_of
from benchmarks.feature_setting import Sizes
from benchmarks.flags import DTYPE_ALIASES, DTYPES
from benchmarks.isolation import termination_as_interruption
from benchmarks.processes import run_jobs
from benchmarks.suite import opened
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.report import environment_lines, format_number
from cs336_systems.profiling.sweep import (
    ConfigurationMismatchError,
    DeathLog,
    Outcome,
    Row,
    RowStore,
    Status,
    write_csv,
)

_TOKENS = 16384
# torch's function has nothing to compile.
_COMPILED = (OURS, "flex", "fa4")


def say(text: str) -> None:
    """A line that is there at once, whoever reads the output."""
    print(text, flush=True)


class Features:
    """A run: compiles, measures cell by cell, and stores each cell's rows when it is measured."""

    def __init__(self, conditions: Conditions, names: Sequence[str], store: RowStore, environment: Environment) -> None:
        self._conditions, self._names, self._store = conditions, names, store
        self._environment = environment_lines(environment)
        self._deaths = DeathLog(store.folder)
        self._compile_s: dict[tuple[str, str], float] = {}
        self._known: dict[tuple[str, str], Outcome] = {}

    def compile(self, cells: Sequence[Cell], processes: int) -> None:
        """First calls of all contenders in parallel processes, whose caches this process then finds.

        What takes too long, or ends its process, is settled here; it is not tried in the process that measures.
        """
        jobs = [
            (cell, name, self._conditions)
            for cell in cells
            for name in self._names
            if name in _COMPILED and callable(CASES[cell.case].makers.get(name))
        ]
        begin, limit = time.monotonic(), self._conditions.limit
        for count, finished in enumerate(run_jobs(first_call, jobs, processes=processes, seconds_each=limit), 1):
            cell, name, _ = finished.job
            after = f"[{count}/{len(jobs)}, {time.monotonic() - begin:.0f} s] {name} {cell.key}"
            if finished.failure:
                self._known[cell.key, name] = _settled(finished.failure)
                say(f"{after}: {finished.failure[:300]}")
            elif isinstance(finished.result, str):
                say(f"{after}: {finished.result[:300]}; it is tried again alone")
            else:
                self._compile_s[cell.key, name] = finished.result
                say(f"{after}: first call done after {finished.result:.1f} s")

    def measure(self, cell: Cell) -> bool:
        """Measure a cell and store its rows. False when the device was lost, and nothing more can be measured."""

        def on_step(name: str, what: str) -> None:
            self._deaths.begin(f"{cell.key}: {name}")

        known = {name: self._known[cell.key, name] for name in self._names if (cell.key, name) in self._known}
        for name in (*self._names, BESIDE):
            if self._deaths.deaths(f"{cell.key}: {name}"):
                known[name] = Outcome(Status.ERROR, "a process ended while it ran here")
        run = CellRun(cell, self._conditions, on_step, known)
        try:
            measured = run.measure(self._names)
        finally:
            self._deaths.end()
        compile_s = {name: self._compile_s[cell.key, name] for name in measured if (cell.key, name) in self._compile_s}
        rows = rows_of(cell, self._conditions, measured, compile_s)
        self._store.append(cell.key, rows)
        self.write()
        parts = [_summary(row, measured[row["implementation"]].ready_s) for row in rows]
        say(f"{cell.key}: {'; '.join(parts)}")
        return not run.device_lost

    def write(self) -> None:
        """The files for people, from all rows that there are."""
        write_csv(self._store.folder / "results.csv", self._store.rows, COLUMNS)
        (self._store.folder / "tables.md").write_text(report(self._store.rows, self._environment))


def _settled(failure: str) -> Outcome:
    late = failure.startswith("took longer")
    return Outcome(Status.SKIPPED if late else Status.ERROR, f"its first call: {' '.join(failure.split())[:300]}")


def _summary(row: Row, ready_s: float | None) -> str:
    ready = "" if ready_s is None else f", first call done after {ready_s:.1f} s"
    if row["median_ms"] is None:
        return f"{row['implementation']} {row['status']} ({row['reason'][:120]}){ready}"
    return f"{row['implementation']} {format_number(row['median_ms'])} ms{ready}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=[*CASES], help="default: all")
    add("--passes", nargs="+", choices=PASSES, default=[*PASSES], help="default: both")
    add("--dims", nargs="+", type=int, default=[64, 128] if gpu else [64], help="head dimensions")
    length = "16,384 and 65,536 for window_4096, 8,192 for the rest" if gpu else "512"
    add("--length", type=int, default=None if gpu else 512, help=f"of every case; default: {length}")
    batch = f"{_TOKENS} / length, at least 1" if gpu else "1"
    add("--batch", type=int, default=None if gpu else 1, help=f"default: {batch}")
    add("--heads", type=int, default=16 if gpu else 2, help="default: %(default)s")
    add("--dtype", default="bfloat16" if gpu else "float32", choices=[*DTYPES, *DTYPE_ALIASES])
    add("--impl", default="flash" if gpu else "tiled", help="ours (default: %(default)s)")
    peers = [*PEERS] if gpu else ["sdpa"]
    add("--against", nargs="*", choices=PEERS, default=peers, help="FlexAttention and fa4 need a GPU; default: all")
    add("--peers", type=Path, metavar="FOLDER", help="where FlashAttention-4 is, as for benchmarks/attention.py")
    add("--device", type=torch.device, default=torch.device("cuda" if gpu else "cpu"))
    add("--rounds", type=int, default=5, help="rounds for the median (default: %(default)s)")
    add("--limit", type=float, default=120, help="seconds for a contender's first call (default: %(default)g)")
    add("--max-seconds", type=float, default=0.5, help="a call that takes longer is not measured (%(default)s)")
    jobs = min(12, os.cpu_count() or 1) if gpu else 0
    add("--jobs", type=int, default=jobs, help="processes that compile; 0: none, one after another (%(default)s)")
    add("--output", type=Path, default=Path("results/features"), help="default: %(default)s")
    add("--resume", action="store_true", help="measure what the output folder does not have yet")
    add("--commit", help="the commit to record where the checkout is not in a git repository")
    options = parser.parse_args(arguments)
    options.dtype = DTYPES[DTYPE_ALIASES.get(options.dtype, options.dtype)]
    if options.peers is not None and not options.peers.is_dir():
        parser.error(f"--peers must be a folder; got {options.peers}")
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order: both passes of a case's sizes after one another."""
    return [
        Cell(case, Sizes(options.batch or max(1, _TOKENS // length), options.heads, length, head_dim), which)
        for case in options.cases
        for length in ([options.length] if options.length else CASES[case].lengths or [8192])
        for head_dim in options.dims
        for which in options.passes
    ]


def contenders_of(options: argparse.Namespace) -> list[str]:
    """Who is measured here, ours first; the others are said to be missing."""
    missing = dict[str, str | None]()
    if options.device.type != "cuda":
        missing = dict.fromkeys(("flex", "fa4"), "measured on a CUDA device only")
    elif "fa4" in options.against:
        missing["fa4"] = why_no_fa4(options.device)
    for name in options.against:
        if missing.get(name):
            say(f"{name} is not measured: {missing[name]}")
    return [OURS, *(name for name in PEERS if name in options.against and not missing.get(name))]


def configuration_of(conditions: Conditions, names: Sequence[str], environment: Environment) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {
        "dtype": str(conditions.dtype),
        "impl": conditions.impl,
        "contenders": [*names],
        "rounds": conditions.rounds,
        "device": environment.device,
        "torch": environment.torch,
        "triton": environment.triton,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 3 for a lost device, 130 when interrupted."""
    options = parse(arguments)
    if options.peers is not None:
        add_peers(options.peers)
    if options.device.index is not None:
        torch.cuda.set_device(options.device)
    shared = (options.peers, options.rounds, options.limit, options.max_seconds)
    conditions = Conditions(options.device, options.dtype, options.impl, *shared)
    names = contenders_of(options)
    environment = collect_environment(options.device, packages=PEER_DISTRIBUTIONS, commit=options.commit)
    try:
        store = opened(options, configuration_of(conditions, names, environment))
    except ConfigurationMismatchError as error:
        print(f"features.py: error: {error}", file=sys.stderr)
        return 2
    cells = [cell for cell in cells_of(options) if not store.is_finished(cell.key)]
    features = Features(conditions, names, store, environment)
    status = 0
    try:
        with termination_as_interruption():
            if options.jobs and cells:
                features.compile(cells, options.jobs)
            if not all(features.measure(cell) for cell in cells):
                say("the device was lost; --resume goes on with the next cell")
                status = 3
    except KeyboardInterrupt:
        say("interrupted; --resume goes on")
        status = 130
    features.write()
    say(f"wrote {options.output / 'tables.md'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
