"""Time and bandwidth of all-reduces, by size and number of processes: NCCL on GPUs, gloo on a CPU.

    python benchmarks/all_reduce.py                                             # as many processes as GPUs
    python benchmarks/all_reduce.py --megabytes 0.001 0.1 1 10 100 1000 4000
    python benchmarks/all_reduce.py --device cpu --processes 2 4 6 --megabytes 1 10 100 1000

Each case has a group of processes. docs/measuring/data_parallel.md says what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch

from benchmarks.lib import flags, harness
from benchmarks.lib.harness import Context, Outcome, Row, Status
from benchmarks.lib.host_memory import available_bytes
from benchmarks.lib.process_groups import require_group_device, run_group, too_few_gpus, unsupported
from benchmarks.lib.steps import most_steps_of
from benchmarks.lib.tables import figures, markdown, matrix, plot_lines, sections, with_columns, with_time
from benchmarks.parts import all_reduce_process
from benchmarks.parts.all_reduce_process import BACKENDS, AllReduceCase
from cs336_systems.parallel.layout import DDP

_FIGURES = ["median_ms", "std_ms", "min_ms", "max_ms", "algorithm_gb_s", "bus_gb_s"]
_COPIES = 2
"""The tensor, and a temporary of it while it is made."""


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    on_gpu = flags.wants_gpu(arguments)
    parser = flags.make_parser(__doc__, "--warmup-steps 5 --steps 10 --most-steps", timeout=600)
    sizes = [1.0, 10.0, 100.0, 1000.0] if on_gpu else [1.0, 10.0, 100.0]
    text = f"sizes of the tensor, in 10⁶ bytes (default: {' '.join(f'{size:g}' for size in sizes)})"
    parser.add_argument("--megabytes", **flags.several(megabytes), default=sizes, metavar="MB", help=text)
    text = "processes that take part, 2 or more (default: 2, 4 and 6 on a CPU; on GPUs these, up to one for each)"
    parser.add_argument("--processes", **flags.several(flags.positive), metavar="N", help=text)
    return parser


def megabytes(text: str) -> float:
    """A positive number of megabytes. Raises argparse.ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of megabytes; got {text!r}")
    return value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with their cases. Ends the program with a message if they do not fit together."""
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    require_group_device(parser, options.device)
    for count in options.processes or ():
        if count < 2:
            parser.error(f"--processes must be at least 2, since one process has nothing to reduce; got {count}")
        if few := too_few_gpus(count, options.device):
            parser.error(f"--processes must be at most the number of GPUs: {few}")
    options.processes = options.processes or usual_processes(options.device)
    options.most_steps = most_steps_of(options)
    axes = sorted({*options.processes}), sorted({*options.megabytes}), options.warmup_steps
    options.cases = [AllReduceCase(BACKENDS[options.device.type], *each) for each in itertools.product(*axes)]
    return options


def usual_processes(device: torch.device) -> list[int]:
    """2, 4 and 6, and on GPUs as many as there are; with one GPU 2, whose rows say why they have no figures."""
    if device.type != "cuda":
        return [2, 4, 6]
    gpus = max(2, torch.cuda.device_count())
    return [*(count for count in (2, 4, 6) if count < gpus), gpus]


def measure(case: AllReduceCase, context: Context) -> Row:
    """The figures of a group of processes. This process does not use a GPU."""
    options, row = context.options, {"bytes": case.bytes}
    refused = unsupported(too_few_gpus(case.processes, options.device))
    available = available_bytes() if options.device.type == "cpu" else None
    needed = _COPIES * case.bytes * case.processes
    if available is not None and needed > available:
        text = f"{case.processes} processes need {needed / 2**30:.1f} GiB; {available / 2**30:.1f} are available"
        refused = Outcome(Status.SKIPPED, text)
    if refused is not None:
        return row | refused.columns
    return row | run_group(all_reduce_process.measure, case, case.processes, DDP, options)


def tables(frame: pd.DataFrame) -> str:
    """All rows; times and bus bandwidths by size and number of processes."""
    frame = with_columns(frame, _FIGURES)
    frame = frame.assign(megabytes=frame["megabytes"].map("{:g}".format))
    done = frame[frame["status"] == Status.OK.value]
    several = ["warmup_steps"] if frame["warmup_steps"].nunique() > 1 else []
    index = ["backend", "megabytes", *several]
    shown = frame[["backend", "processes", "megabytes", *several]].join(frame[[*_FIGURES, "status"]])
    shown["median_ms"] = figures(frame, "median_ms")
    return sections(
        {
            "All-reduces": markdown(shown),
            "Milliseconds, with intervals": matrix(with_time(done), index, "processes", "time") if len(done) else "",
            "Bus bandwidth, GB/s": matrix(done, index, "processes", "bus_gb_s") if len(done) else "",
        }
    )


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot time and bus bandwidth over the size, on logarithmic scales, with a line for each number of processes."""
    frame = frame[frame["status"] == Status.OK.value]
    if frame.empty:
        return
    shown = frame.assign(line=[f"{count} processes" for count in frame["processes"]])
    how: dict[str, Any] = {"x": "megabytes", "line": "line", "panel": "backend", "x_base": 10}
    how["title"] = "All-reduce of float32"
    plot_lines(folder / "time.png", shown, y="median_ms", y_label="ms", **how)
    plot_lines(folder / "bus-bandwidth.png", shown, y="bus_gb_s", y_label="bus bandwidth, GB/s", **how)


PROGRAM = harness.Program(
    name="all_reduce",
    title="All-reduce",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("steps", "seed"),
    notes=(
        "float32, in place; a megabyte is 10⁶ bytes",
        "{steps} all-reduces after the warm-up, and more of them until the median is precise, at most {most_steps}",
        "processes begin each one together; its time is that of the slowest process: device events on GPUs, the clock "
        "on a CPU",
        "algorithm bandwidth: bytes over time; bus bandwidth: times 2 (n - 1) / n, as nccl-tests defines it",
    ),
    memory=lambda case, options: _COPIES * case.bytes * (case.processes if options.device.type == "cpu" else 1),
    isolated=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return harness.run(PROGRAM, options, options.cases)


if __name__ == "__main__":
    sys.exit(main())
