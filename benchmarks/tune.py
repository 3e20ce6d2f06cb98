"""Search tile configurations of the portable kernels on this GPU, and print rows for `kernels/tuning.py`.

    python benchmarks/tune.py                                        # every pass and dimension, 16-bit inputs
    python benchmarks/tune.py --passes dq dkdv --dims 128 --arithmetic float32 --length 4096 --time-limit 500
    python benchmarks/tune.py --length 512 --batch 8 --heads 1       # a grid for half of the GPU's SMs or fewer
    python benchmarks/tune.py --with-rules --dims 64 128             # the rows for masks and scores with rules

Candidates that cannot fit are left out. The others are compiled in parallel processes and their results held to the
tests' error budget there, so that none that fails, hangs or breaks its process harms the search. Those that are right
are timed once, and the best few again in rotation beside the row of the table, since a GPU's clocks fall under load and
would favour whichever came first. A configuration's score is the geometric mean of its times with a causal and with a
full mask, or --with-rules those with a window, slopes, a bias and documents; the winner also has to be right on lengths
that no tile divides. Every measurement is written to
measurements.csv in the output folder as it is made.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import triton

from benchmarks.processes import run_jobs
from benchmarks.tune_candidates import Row, candidates
from benchmarks.tune_trial import Problem, Trial, check, check_ragged, inputs_of, milliseconds
from cs336_systems.kernels import tuning
from cs336_systems.kernels.tuning import TileConfig
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.profiling.sweep import outcome_of
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, interleave

COLUMNS = (
    *(
        "pass",
        "arithmetic",
        "head_dim",
        "batch",
        "heads",
        "length",
        "tile_q",
        "tile_k",
        "num_warps",
        "num_stages",
        "ahead",
    ),
    *("programs", "stage", "mask", "milliseconds", "status"),
)
FIRST = TimingMethod(rounds=1, warmup_ms=3.0, repetitions_ms=10.0, pause_ms=20.0)
# The part of a row's time that compiling may take; the rest is for measuring.
_COMPILING_SHARE = 0.7

Times = dict[str, RoundTimes]
"""The times of one configuration by mask."""


class Log:
    """The CSV file of the measurements, a line at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            self._append(COLUMNS)

    def add(self, trial: Trial, stage: str, *, mask: str = "", ms: float | None = None, status: str = "ok") -> None:
        """One measurement, or what kept it from being made."""
        problem, row = trial.problem, trial.problem.row
        grid = trial.config.programs(row.name, *problem.work)
        shape = (problem.batch, problem.heads, problem.length)
        tiles = dataclasses.astuple(trial.config)
        time_or_nothing = "" if ms is None else f"{ms:.6f}"
        self._append(
            (row.name, row.arithmetic, row.head_dim, *shape, *tiles, grid, stage, mask, time_or_nothing, status)
        )

    def _append(self, line: Sequence[object]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(line)


def score(times: Mapping[str, RoundTimes]) -> float:
    """The geometric mean over the cases of the median times: a gain of a tenth counts the same with each."""
    return math.prod(rounds.median for rounds in times.values()) ** (1 / len(times))


def right_ones(trials: Sequence[Trial], log: Log, options: argparse.Namespace, deadline: float) -> list[Trial]:
    """The trials that compile, run and compute what they should, as far as there was time to find out."""
    right = []
    jobs = {"processes": options.jobs, "seconds_each": options.seconds_each, "deadline": deadline}
    for finished in run_jobs(check, trials, **jobs):
        reason = finished.failure or finished.result
        log.add(finished.job, "check", status=" ".join(reason.split()) or "ok")
        if not reason:
            right.append(finished.job)
    return sorted(right, key=trials.index)


def timed(
    trials: Sequence[Trial], stage: str, method: TimingMethod, log: Log, deadline: float = math.inf
) -> dict[TileConfig, Times]:
    """Times of the trials by configuration, interleaved; whoever fails or comes after the deadline is left out."""
    if not trials:
        return {}
    tensors = inputs_of(trials[0].problem, trials[0].device)

    def measure(trial: Trial, mask: str) -> float:
        if time.monotonic() > deadline:
            raise TimeoutError("no time was left")
        ms = milliseconds(trial, tensors, mask, method)
        log.add(trial, stage, mask=mask, ms=ms)
        return ms

    cases = trials[0].problem.cases
    named = {f"{trial.config}, {case}": (trial, case) for trial in trials for case in cases}

    def failed(name: str, error: Exception) -> None:
        log.add(named[name][0], stage, mask=named[name][1], status=str(outcome_of(error)))

    measurements = {name: functools.partial(measure, *pair) for name, pair in named.items()}
    times = interleave(measurements, method=method, on_error=failed)
    by_config: dict[TileConfig, Times] = {}
    for name, rounds in times.items():
        trial, mask = named[name]
        by_config.setdefault(trial.config, {})[mask] = rounds
    return {config: found for config, found in by_config.items() if len(found) == len(cases)}


def search(
    problem: Problem, others: Mapping[str, TileConfig], options: argparse.Namespace, log: Log, deadline: float
) -> TileConfig | None:
    """The best configuration of one row on one problem, with the best few printed; None if nothing was measured."""
    row, device = problem.row, torch.device("cuda", torch.cuda.current_device())
    now = tuning.lookup(row.name, row.arithmetic, row.head_dim, device, *problem.work, problem.with_rules)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    like = [now]
    if problem.with_rules:  # the row for plain calls was searched, so what is like it comes first too
        like.append(tuning.lookup(row.name, row.arithmetic, row.head_dim, device))
    both = zip(*[candidates(row, one, torch.cuda.get_device_capability(device), limit) for one in like], strict=False)
    distinct = dict.fromkeys(itertools.chain.from_iterable(both))
    configs = [config for config in distinct if not (config.ahead and problem.with_rules)][: options.most]
    trials = [Trial(problem, config, dict(others)) for config in configs]
    compiling = time.monotonic() + (deadline - time.monotonic()) * _COMPILING_SHARE
    right = right_ones(trials, log, options, compiling)
    print(f"# {row} on {problem.shape}: {len(right)} of {len(trials)} candidates compiled and are right", flush=True)
    first = timed(right, "first", FIRST, log, deadline)
    if not first:
        print(f"# {row}: nothing was measured", flush=True)
        return None
    # The finals take seconds, and without them what came before was for nothing: they may end after the deadline.
    best = sorted(first, key=lambda config: score(first[config]))[: options.finalists]
    finalists = [trial for trial in right if trial.config in {*best, now}]
    method = dataclasses.replace(FIRST, rounds=options.rounds, repetitions_ms=15.0)
    final = timed(finalists, "final", method, log)
    ranked = sorted(final, key=lambda config: score(final[config]))
    for config in ranked:
        print(line(problem, config, final, now))
    for config in ranked:
        wrong = _verdict(Trial(problem, config, dict(others)), log, options)
        if not wrong:
            print(f"# for {table_of(problem, device)}:")
            print(f"{row}: TileConfig{dataclasses.astuple(config)},", flush=True)
            return config
        print(f"# {dataclasses.astuple(config)} is out: {wrong}", flush=True)
    return None


def _verdict(trial: Trial, log: Log, options: argparse.Namespace) -> str:
    (finished,) = run_jobs(check_ragged, [trial], processes=1, seconds_each=2 * options.seconds_each)
    reason = str(finished.failure or finished.result)
    log.add(trial, "check ragged", status=" ".join(reason.split()) or "ok")
    return reason


def table_of(problem: Problem, device: torch.device) -> str:
    """The table that a row found on this problem belongs to: small grids get rows of their own."""
    row = problem.row
    if problem.with_rules:
        return "WITH_RULES"
    usual = tuning.lookup(row.name, row.arithmetic, row.head_dim, device)
    few = tuning.leaves_half_idle(usual.programs(row.name, *problem.work), device)
    return "SMALL_GRIDS" if few else "TABLES"


def line(problem: Problem, config: TileConfig, final: Mapping[TileConfig, Times], now: TileConfig) -> str:
    """A finalist for people: configuration, times, programs, and its speed-up over the table's row."""
    times = final[config]
    grid = config.programs(problem.row.name, *problem.work)
    text = f"#   {dataclasses.astuple(config)!s:26} {grid:6} programs"
    text += "".join(f"  {case} {times[case].median:.4f} ms" for case in times)
    if now in final:
        gains = [times[case].speedup_over(final[now][case]) for case in times]
        text += f"  {math.prod(gains) ** (1 / len(gains)):.3f} × the table's row"
    return text + ("  (now)" if config == now else "")


def rows_of(options: argparse.Namespace) -> list[Row]:
    """The rows asked for: by arithmetic and dimension, the passes of one dimension together."""
    return [
        Row(name, arithmetic, head_dim)
        for arithmetic, head_dim, name in itertools.product(options.arithmetic, options.dims, options.passes)
    ]


def problem_of(row: Row, options: argparse.Namespace) -> Problem:
    """What a row is tried on."""
    batch = options.batch or max(1, options.tokens // options.length)
    heads = options.heads or max(1, options.channels // row.head_dim)
    return Problem(row, batch, heads, options.length, options.with_rules)


def search_all(
    options: argparse.Namespace,
    log: Log,
    search_one: Callable[..., TileConfig | None] = search,
) -> dict[Row, TileConfig]:
    """Search every row, each with an equal share of the time that is left. The best by row."""
    deadline = time.monotonic() + options.time_limit
    rows, found = rows_of(options), dict[Row, TileConfig]()
    for position, row in enumerate(rows):
        left = deadline - time.monotonic()
        if left <= 0:
            print(f"# no time was left for {', '.join(map(str, rows[position:]))}")
            break
        # Both passes of the backward are timed together: each beside the best that was found for the other.
        same = {r.name: c for r, c in found.items() if dataclasses.replace(r, name=row.name) == row}
        until = time.monotonic() + left / (len(rows) - position)
        best = search_one(problem_of(row, options), same, options, log, until)
        if best is not None:
            found[row] = best
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, value: Any, text: str, **fields: Any) -> None:
        fields.setdefault("type", type(value))
        parser.add_argument(f"--{name}", default=value, help=f"{text} (default: %(default)s)", **fields)

    names = ["forward", "dq", "dkdv"]
    add("passes", names, "passes", nargs="+", choices=names, type=str)
    add("arithmetic", ["half"], "arithmetic", nargs="+", choices=["half", "float32"], type=str)
    add("dims", [16, 32, 64, 128, 256], "padded head dimensions", nargs="+", type=int, choices=[16, 32, 64, 128, 256])
    add("length", 4096, "rows of q and k in each sequence")
    add("tokens", 16384, "rows over the whole batch")
    add("channels", 2048, "heads times head dimension")
    parser.add_argument("--batch", type=int, help="sequences, in place of tokens / length")
    parser.add_argument("--heads", type=int, help="heads, in place of channels / head dimension")
    parser.add_argument("--with-rules", action="store_true", help="search the rows for masks and scores with rules")
    add("finalists", 6, "configurations that are timed again, beside the table's row")
    add("rounds", 5, "rotations in which they are")
    add("most", 400, "candidates of a row, those most like the table's row first")
    add("jobs", 12, "processes that compile and check")
    add("seconds-each", 90.0, "what a candidate may take to compile and run")
    add("time-limit", 3600.0, "seconds for everything; rows share what is left equally")
    parser.add_argument("--output", type=Path, help="folder for the measurements (default: results/tune/<date>)")
    options = parser.parse_args(arguments)
    for name in ("length", "tokens", "channels", "finalists", "rounds", "most", "jobs", "seconds_each", "time_limit"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {getattr(options, name)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, print and write; the exit status."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        print("tune.py: error: tuning needs a CUDA GPU; torch sees none", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    folder = options.output or Path("results") / "tune" / f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    collect_environment("cuda").write(folder / "environment.json")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    print(f"# {properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}", end=", ")
    print(f"triton {triton.__version__}; measurements: {folder}", flush=True)
    try:
        search_all(options, Log(folder / "measurements.csv"))
    except KeyboardInterrupt:
        print("# interrupted; what was measured is written")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
