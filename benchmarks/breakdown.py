"""Where the time of a model's passes goes: kernels, their classes, the model's regions, and the parts of attention.

    python benchmarks/breakdown.py                                            # every preset, context and mode
    python benchmarks/breakdown.py --preset medium --context 1024 --model naive flash --mode step --trace
    python benchmarks/breakdown.py --preset tiny --context 64 --device cpu
    python benchmarks/breakdown.py --preset small --context 256 --nsys-ranges # under nsys; see what is printed for it

Each row is measured in a process of its own, and is stored when it is measured; --resume goes on where a run stopped.
Times are those of steps without the profiler. docs/measuring/breakdown.md says what is measured, and how.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked_device import asks_for_gpu
from benchmarks.breakdown_cell import BFLOAT16, DTYPES, MODES, Cell, Conditions, measure_cell
from benchmarks.breakdown_report import draw, row_of, write
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, positive, run
from benchmarks.training_cell import Cell as Work
from benchmarks.training_models import COMPILE, LLAMA, MODELS, NAIVE, NOTHING, modules_for
from benchmarks.training_run import add_model_options, add_timing_options, check_presets, timing_configuration
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.sweep import Outcome, Row, Status
from cs336_systems.training.config import TINY
from cs336_systems.training.estimate import estimate_memory


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are tiny where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    sizes = (("small", "medium", "large", "xl", "2.7B"), (128, 256, 512, 1024)) if gpu else ((TINY,), (128,))
    add_model_options(parser, *sizes)
    add = parser.add_argument
    add("--batch", type=positive, default=4, metavar="B", help="sequences of a step (default: %(default)s)")
    add("--model", nargs="+", choices=MODELS, default=[NAIVE], metavar="NAME", help=f"of {', '.join(MODELS)} (naive)")
    add("--mode", nargs="+", choices=MODES, default=[*MODES], metavar="MODE", help=f"of {', '.join(MODES)} (all)")
    add("--dtype", nargs="+", choices=DTYPES, default=[BFLOAT16], metavar="TYPE", help=f"of {', '.join(DTYPES)}")
    add("--compile", choices=COMPILE, default=NOTHING, help="what torch.compile is given; it has no regions inside")
    add_timing_options(parser)
    add("--profiled-steps", type=positive, default=3, metavar="N", help="steps in a trace (default: %(default)s)")
    add("--trace", action="store_true", help="keep each trace, for https://ui.perfetto.dev, in traces/ of the output")
    add("--nsys-ranges", action="store_true", help="NVTX ranges for Nsight Systems in place of torch.profiler; CUDA")
    add_run_options(parser, "results/breakdown")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    check_presets(parser, options)
    check_run_options(parser, options)
    if options.nsys_ranges and options.device.type != "cuda":
        parser.error(f"--nsys-ranges needs a CUDA device; got {options.device}")
    if options.nsys_ranges and options.trace:
        parser.error("--trace needs torch.profiler, which --nsys-ranges does without")
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order: the modes of one model after one another, short contexts first."""
    return [
        Cell(Work(preset, options.suite, options.vocab_size, context, options.batch, model, options.compile), *rest)
        for preset in options.preset
        for context in sorted(options.context)
        for model in options.model
        for rest in [(dtype, mode) for dtype in options.dtype for mode in MODES if mode in options.mode]
    ]


def no_room(cell: Cell, rows: Sequence[Row]) -> Outcome | None:
    """Why a cell is not tried: the same model ran out of memory at shorter lengths, or in a mode that takes less."""
    modes = list(MODES)
    wanted = row_of(cell, {}, False)
    same = ("preset", "suite", "vocab_size", "batch", "model", "compile", "dtype")
    for row in rows:
        less = row["context"] <= cell.work.context and modes.index(row["mode"]) <= modes.index(cell.mode)
        if less and row["status"] == Status.OUT_OF_MEMORY.value and all(row[name] == wanted[name] for name in same):
            reason = f"memory ran out at {row['batch']} × {row['context']}, {row['mode']}, already"
            return Outcome(Status.SKIPPED, reason)
    return None


def method_of(options: argparse.Namespace) -> list[str]:
    """How rows were measured, in sentences."""
    tf32 = "may use" if options.tf32 else "do not use"
    profiled = f"{options.profiled_steps} other steps of the same process, after one that starts the profiler"
    if options.nsys_ranges:
        profiled += ", ran with NVTX ranges, for Nsight Systems"
    else:
        profiled += ", were profiled, with ranges for the model's regions; all but the times of steps is from these"
    return [
        f"step, ms: the median of {options.steps} steps without profiler and ranges, after {options.warmup} that are "
        "not timed; this is the time to go by",
        profiled,
        "profiler's cost: how much longer a profiled step took, by the medians; work: all kernels of a step, added up; "
        "busy: these over the time of a step without the profiler",
        f"float32 parameters; products of float32 {tf32} TF32; bfloat16 is autocast; each row in its own process",
        "fused attention kernels contain products and softmax, and are a class of their own",
    ]


def tool_of(options: argparse.Namespace) -> Tool[Cell]:
    """What measures the cells, as the options say."""
    conditions = Conditions(
        options.device,
        options.warmup,
        options.steps,
        options.profiled_steps,
        options.tf32,
        options.seed,
        options.output / "traces" if options.trace else None,
        options.nsys_ranges,
    )
    ranges = {"profiled_steps": options.profiled_steps, "nsys_ranges": options.nsys_ranges}

    def finish(cell: Cell, measured: Row, environment: Environment) -> Row:
        return row_of(cell, measured, options.tf32)

    def write_all(folder: Path, rows: Sequence[Row], environment: Environment) -> None:
        write(folder, rows, environment, method_of(options))

    return Tool(
        "breakdown.py",
        measure_cell,
        conditions,
        finish,
        write_all,
        timing_configuration(options) | ranges,
        no_room,
        estimate,
        draw,
        packages=("transformers",),
        preload=modules_for(options.model, [options.compile]),
    )


def estimate(cell: Cell) -> Estimate:
    """The memory of a step, as the trainer estimates it; nothing is known of others' models, nor of time."""
    if cell.work.model == LLAMA or cell.mode != "step":
        return Estimate()
    return Estimate(bytes=estimate_memory(cell.work.config, cell.work.batch, autocast=cell.dtype == BFLOAT16).total)


def nsys_command(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """The command that runs the same cells under Nsight Systems, with a report for each."""
    left_out = {"--trace", "--resume", "--dry-run"}
    program = [sys.executable, str(Path(__file__).resolve()), *(text for text in arguments if text not in left_out)]
    folder = options.output.with_name(f"{options.output.name}-nsys")
    profiler = "nsys profile --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=repeat"
    # The last --output is the one that counts.
    ours = ["--nsys-ranges", "--output", str(folder)]
    return f"{profiler} --output {shlex.quote(str(folder))} {shlex.join([*program, *ours])}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.device.type == "cuda" and not options.nsys_ranges and shutil.which("nsys"):
        print(f"the same ranges in Nsight Systems: {nsys_command(options, arguments)}", flush=True)
    return run(tool_of(options), options, cells_of(options))


if __name__ == "__main__":
    sys.exit(main())
