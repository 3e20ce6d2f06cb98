"""Where the time of a model's step goes: kernels, their classes, the model's regions, and the steps of attention.

    python benchmarks/breakdown.py                                            # every model, length and mode
    python benchmarks/breakdown.py --models medium --lengths 1024 --providers naive flash --modes step --trace
    python benchmarks/breakdown.py --models tiny --lengths 64 --device cpu
    python benchmarks/breakdown.py --models small --lengths 256 --nsys-ranges # under nsys; the program prints how
    python benchmarks/breakdown.py --nsys-reports results/*.nsys-rep --out results/breakdown-nsys   # and then this

Use the times without the profiler. docs/measuring/breakdown.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.lib import flags, harness, models
from benchmarks.lib.harness import Context, Row
from benchmarks.lib.models import BLOCKS, FORWARD_BACKWARD, WHOLE, ModelCase
from benchmarks.lib.steps import TrainingStep, make_step, step_columns
from benchmarks.parts.breakdown_nsys import add_reports, commands
from benchmarks.parts.breakdown_tables import plots, profiled_columns, tables
from cs336_systems.profiling import ModuleRanges, read_trace, record_trace, region_of_module
from cs336_systems.profiling.regions import OPTIMIZER
from cs336_systems.profiling.steps import time_steps
from cs336_systems.profiling.timing import synchronize

_INSIDE_BLOCKS = re.compile(r"(^|\.)layers\.\d+\.")


_USUAL = (
    "--batch 4 --providers naive --dtypes bf16 --compile none --modes forward forward+backward step --warmup-steps 3"
)
_USUAL += " --steps 10 --tf32"
_ON_A_GPU = "--models small medium large xl 2.7B --lengths 128 256 512 1024"
_WITHOUT = "--models tiny --lengths 128"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    add = parser.add_argument
    add("--profiled-steps", type=flags.positive, default=3, metavar="N", help="steps in a trace (default: %(default)s)")
    add("--trace", action="store_true", help="keep each trace in traces/ of the results, for https://ui.perfetto.dev")
    add("--nsys-ranges", action="store_true", help="NVTX ranges for Nsight Systems instead of torch.profiler; CUDA")
    text = "add what these .nsys-rep or .sqlite files of --nsys-ranges hold to the rows in --out, and measure nothing"
    add("--nsys-reports", nargs="+", type=Path, metavar="FILE", help=text)
    return parser


def measure(case: ModelCase, context: Context) -> Row:
    """The time of a case without the profiler, and then where it goes."""
    options = context.options
    skipped = models.smaller_out_of_memory(case, context.rows)
    if skipped is not None:
        return skipped.columns
    device: torch.device = options.device
    gc.collect()  # with --nsys-ranges the case before was in this process
    step, _ = make_step(case, device, options.seed)
    call = call_of(step, case.mode)
    times = time_steps({"step": call}, device=device, steps=options.steps, warmup=case.warmup_steps).step
    row = step_columns(times)
    with ranges_of(step.model, case.compile) as ranges:
        call = call_of(step, case.mode, partial(phase_range, ranges))
        if not options.nsys_ranges:
            return row | profile(case, call, options, times.median)
        call()
        # The range tells which case a report is of.
        with torch.cuda.profiler.profile(), torch.cuda.nvtx.range(case.name):
            for _ in range(options.profiled_steps):
                call()
            synchronize(device)
    return row


def call_of(
    step: TrainingStep, mode: str, phase: Callable[[str], AbstractContextManager[object]] = nullcontext
) -> Callable[[], None]:
    """A function of which a call is one step of a mode, and leaves no gradients."""

    def call() -> None:
        step.run(mode, phase)
        if mode == FORWARD_BACKWARD:
            step.optimizer.zero_grad()

    return call


@contextmanager
def phase_range(ranges: ModuleRanges, phase: str) -> Iterator[None]:
    """The range of a phase. The whole optimizer is one region too."""
    with ranges.phase(phase), ranges.range(OPTIMIZER) if phase == "optimizer" else nullcontext():
        yield


def ranges_of(model: nn.Module, how: str) -> ModuleRanges:
    """The ranges of a model, without modules inside of compiled code."""
    if how == WHOLE:
        return ModuleRanges(nn.Module())

    def region_of(path: str, module: nn.Module) -> str | None:
        return None if how == BLOCKS and _INSIDE_BLOCKS.search(path) else region_of_module(path, module)

    return ModuleRanges(model, region_of)


def profile(case: ModelCase, call: Callable[[], None], options: argparse.Namespace, unprofiled_ms: float) -> Row:
    """What the profiler records of a step, and how much slower it makes the step; writes the files of the case."""
    steps = options.profiled_steps
    with tempfile.TemporaryDirectory() as temporary:
        trace = models.file_of(options.out if options.trace else Path(temporary), "traces", case, "json")
        times = record_trace(call, trace, device=options.device, steps=steps)
        calls = read_trace(trace, device=options.device)
    return profiled_columns(calls, case, steps=steps, ms=times.median, unprofiled_ms=unprofiled_ms, out=options.out)


PROGRAM = harness.Program(
    name="breakdown",
    title="Where the time goes",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "profiled_steps", "nsys_ranges", "tf32", "seed"),
    notes=(
        "median_ms: the median of {steps} steps without the profiler; use this time",
        "everything else: {profiled_steps} other steps of the same process, by torch.profiler; with --nsys-ranges "
        "by Nsight Systems, and all cases in one process",
        "profiler_cost: a profiled step over a step without the profiler; work_ms: all kernels of a step, added up; "
        "busy: work_ms over median_ms. On a CPU these are operators, without nested ones",
        "float32 parameters; 16-bit dtypes are autocast",
        "fused attention kernels have products and softmax in one, and are a class",
        "regions and kernels of each case: details/, regions/ and kernels/",
    ),
    memory=models.least_memory,
    packages=("transformers",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    if options.nsys_reports:
        return add_reports(PROGRAM, parser, options)
    if options.nsys_ranges and options.device.type != "cuda":
        parser.error(f"--nsys-ranges needs a CUDA device; got {options.device}")
    if options.nsys_ranges and (options.trace or options.visits > 1):
        parser.error("--nsys-ranges must be without --trace, which torch.profiler writes, and with one of --visits")
    if options.device.type == "cuda" and not options.nsys_ranges and shutil.which("nsys"):
        print("the same with Nsight Systems:", *commands(__file__, options.out, arguments), sep="\n", flush=True)
    # nsys does not see all that a forked process does.
    program = dataclasses.replace(PROGRAM, isolated=not options.nsys_ranges)
    return models.run_models(program, parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
