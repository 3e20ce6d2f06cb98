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

import torch

from benchmarks.attention import termination_as_interruption
from benchmarks.processes import run_jobs
from benchmarks.training_cell import Cell, Conditions, columns_of_failure, measure_cell
from benchmarks.training_models import COMPILE, MODELS, WHOLE
from benchmarks.training_report import PLOT, draw, row_of, write
from benchmarks.training_run import (
    TOKENS,
    Rows,
    add_model_options,
    add_run_options,
    check_presets,
    environment_of,
    failed,
    opened,
    positive,
    shared_configuration,
)
from cs336_systems.profiling.sweep import ConfigurationMismatchError, Outcome, Row, RowStore, Status
from cs336_systems.training.config import TINY
from cs336_systems.training.prepare import choose_device


def build_parser() -> argparse.ArgumentParser:
    """The parser; without a GPU its defaults are tiny."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    presets, contexts = (("small", "medium", "large", "2.7B"), (512, 1024, 4096, 16384)) if gpu else ((TINY,), (128,))
    add_model_options(parser, presets, contexts)
    add = parser.add_argument
    tokens = TOKENS if gpu else 512
    add("--tokens", type=positive, default=tokens, metavar="N", help="of a step: batch × context (%(default)s)")
    add("--batch", type=positive, metavar="B", help="sequences of a step (default: tokens / context, at least 1)")
    add("--model", nargs="+", choices=MODELS, default=[*MODELS], metavar="NAME", help=f"of {', '.join(MODELS)}")
    add("--compile", choices=COMPILE, default=WHOLE, help="what torch.compile is given (default: %(default)s)")
    add("--device", default="auto", help="cuda, cuda:1 or cpu (default: a GPU where there is one)")
    add_run_options(parser, "results/training-step")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    check_presets(parser, options)
    try:
        options.device = choose_device(options.device)
    except ValueError as error:
        parser.error(str(error))
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


def measured_alone(cell: Cell, conditions: Conditions, limit: float) -> Row:
    """The columns of a cell, measured in a process of its own, which ends with it."""
    (finished,) = run_jobs(measure_cell, [(cell, conditions)], processes=1, seconds_each=limit)
    if finished.failure:
        return columns_of_failure(failed(finished.failure))
    row: Row = finished.result
    return row


def method_of(options: argparse.Namespace) -> list[str]:
    """How rows were measured, in sentences."""
    tf32 = "may use" if options.tf32 else "do not use"
    return [
        f"{options.steps} timed steps after {options.warmup}, of which the first compiles; each row in its own process",
        f"float32 parameters, bfloat16 autocast; products of float32 {tf32} TF32; gradients limited, fused AdamW",
        "MFU: (6 N + 12 L d_model T) · tokens/s over the device's bfloat16 peak, N without the embedding's table",
        "over llama, over sdpa: how many times as fast, by the medians, at the same preset, batch and context",
    ]


def measure_all(options: argparse.Namespace, store: RowStore, rows: Rows, cells: Sequence[Cell]) -> int:
    """Go through the cells; the exit status."""
    rows.progress.note(f"results: {options.output}")
    try:
        with termination_as_interruption():
            for cell in cells:
                rows.of(cell)
    except KeyboardInterrupt:
        rows.progress.note("interrupted; the same command with --resume goes on")
        return 130
    finally:
        if draw(options.output, store.rows):
            rows.progress.note(f"wrote {options.output / PLOT}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    conditions = Conditions(options.device, options.warmup, options.steps, options.tf32, options.seed)
    try:
        environment = environment_of(options.device, options.commit)
        store = opened(options, shared_configuration(options, environment))
    except (ConfigurationMismatchError, RuntimeError) as error:
        print(f"training_step.py: error: {error}", file=sys.stderr)
        return 2
    environment.write(options.output / "environment.json")

    def measure(cell: Cell) -> Row:
        skipped = no_room(cell, store.rows)
        measured = columns_of_failure(skipped) if skipped else measured_alone(cell, conditions, options.limit)
        return row_of(cell, measured, options.tf32, environment.device)

    def write_all() -> None:
        write(options.output, store.rows, environment, method_of(options))

    cells = cells_of(options)
    status = measure_all(options, store, Rows(store, measure, write_all, len(cells), environment), cells)
    write_all()
    return status


if __name__ == "__main__":
    sys.exit(main())
