"""The time and memory of a whole training step: forward, backward, the gradient's limit, and fused AdamW, on one GPU.

    python benchmarks/training_step.py                                         # every preset, context and model
    python benchmarks/training_step.py --preset medium --context 1024 4096 --model flash sdpa llama
    python benchmarks/training_step.py --preset tiny --context 128 --tokens 512 --compile none --device cpu

Each row is measured in a process of its own, and is stored when it is measured; --resume goes on where a run stopped.
Parameters are float32, products bfloat16 by autocast. docs/benchmarking.md says what is measured, and why in this way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked_device import asks_for_gpu
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, positive, run
from benchmarks.training_cell import Cell, Conditions, measure_cell
from benchmarks.training_models import COMPILE, LLAMA, MODELS, WHOLE, modules_for, start_seconds
from benchmarks.training_report import draw, flops_per_token, row_of, write
from benchmarks.training_run import (
    TOKENS,
    add_model_options,
    add_timing_options,
    check_presets,
    timing_configuration,
)
from cs336_systems.profiling.environment import Environment, device_name
from cs336_systems.profiling.flops import device_peak
from cs336_systems.profiling.sweep import Outcome, Row, Status
from cs336_systems.training.config import TINY
from cs336_systems.training.estimate import estimate_memory

_USUAL_PART_OF_PEAK = 0.4


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are tiny where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    presets, contexts = (("small", "medium", "large", "2.7B"), (512, 1024, 4096, 16384)) if gpu else ((TINY,), (128,))
    add_model_options(parser, presets, contexts)
    add = parser.add_argument
    tokens = TOKENS if gpu else 512
    add("--tokens", type=positive, default=tokens, metavar="N", help="of a step: batch × context (%(default)s)")
    add("--batch", type=positive, metavar="B", help="sequences of a step (default: tokens / context, at least 1)")
    add("--model", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME", help=f"of {', '.join(MODELS)}")
    add("--compile", choices=COMPILE, default=WHOLE, help="what torch.compile is given (default: %(default)s)")
    add_timing_options(parser)
    add_run_options(parser, "results/training-step")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    check_presets(parser, options)
    check_run_options(parser, options)
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order: the models of one preset and context after one another, short contexts first."""
    return [
        Cell(preset, options.suite, options.vocab_size, context, batch, model, options.compile)
        for preset in options.preset
        for context in sorted(options.context)
        for batch in [options.batch or max(1, options.tokens // context)]
        for model in options.model
    ]


def no_room(cell: Cell, rows: Sequence[Row]) -> Outcome | None:
    """Why a cell is not tried: the same model ran out of memory with as few tokens, or fewer, in shorter sequences."""
    for row in rows:
        same = all(row[name] == getattr(cell, name) for name in ("preset", "suite", "vocab_size", "model"))
        less = row["context"] <= cell.context and row["batch"] * row["context"] <= cell.batch * cell.context
        if same and less and row["compile"] == cell.compiles and row["status"] == Status.OUT_OF_MEMORY.value:
            reason = f"memory ran out at {row['batch']} × {row['context']} already"
            return Outcome(Status.SKIPPED, reason)
    return None


def method_of(options: argparse.Namespace) -> list[str]:
    """How rows were measured, in sentences."""
    tf32 = "may use" if options.tf32 else "do not use"
    return [
        f"{options.steps} timed steps after {options.warmup}, of which the first compiles; each row in its own process",
        f"float32 parameters, bfloat16 autocast; products of float32 {tf32} TF32; gradients limited, fused AdamW",
        "MFU: (6 N + 12 L d_model T) · tokens/s over the device's bfloat16 peak, N without the embedding's table; "
        "the pairs that the causal mask hides are counted",
        "over llama, over sdpa: how many times as fast, by the medians, at the same preset, batch and context",
    ]


def tool_of(options: argparse.Namespace) -> Tool[Cell]:
    """What measures the cells, as the options say."""
    conditions = Conditions(options.device, options.warmup, options.steps, options.tf32, options.seed)

    def finish(cell: Cell, measured: Row, environment: Environment) -> Row:
        return row_of(cell, measured, options.tf32, environment.device)

    def write_all(folder: Path, rows: Sequence[Row], environment: Environment) -> None:
        write(folder, rows, environment, method_of(options))

    def estimate(cell: Cell) -> Estimate:
        return Estimate(_seconds(cell, options), _bytes(cell))

    return Tool(
        "training_step.py",
        measure_cell,
        conditions,
        finish,
        write_all,
        timing_configuration(options),
        no_room,
        estimate,
        draw,
        packages=("transformers",),
        preload=modules_for(options.model, [options.compile]),
    )


def _seconds(cell: Cell, options: argparse.Namespace) -> float | None:
    """At the part of the peak that training usually reaches; None where the peak is not known."""
    peak = device_peak(device_name(options.device))
    if peak is None:
        return None
    flops = flops_per_token(cell.config) * cell.batch * cell.context * (options.warmup + options.steps)
    return start_seconds(cell.compiles, cell.config.num_layers) + flops / (_USUAL_PART_OF_PEAK * peak.half * 1e12)


def _bytes(cell: Cell) -> int | None:
    """What the trainer estimates for the same model; nothing is known of others' models."""
    if cell.model == LLAMA:
        return None
    return estimate_memory(cell.config, cell.batch, autocast=True).total


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    return run(tool_of(options), options, cells_of(options))


if __name__ == "__main__":
    sys.exit(main())
