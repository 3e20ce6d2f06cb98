"""Where the memory goes: of forward, forward and backward, and whole steps, in float32 and in mixed precision.

    python benchmarks/memory.py                                          # presets × contexts × modes × dtypes
    python benchmarks/memory.py --preset large --context 512 --mode step --checkpoint-every 1 2 3 4 6 9 12 18 36
    python benchmarks/memory.py --preset tiny --context 128 --device cpu

Each row is measured in a process of its own, and is stored when it is measured; --resume goes on where a run stopped.
docs/measuring/memory.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked_device import asks_for_gpu
from benchmarks.memory_cell import DTYPES, FORWARD_ONLY, MODELS, MODES, STEP, Cell, Conditions, measure_cell
from benchmarks.memory_plots import draw
from benchmarks.memory_report import row_of, write
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, positive, run
from benchmarks.training_models import NAIVE
from benchmarks.training_run import add_model_options, check_presets
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.sweep import Outcome, Row, Status
from cs336_systems.training.config import TINY
from cs336_systems.transformer import TransformerConfig

_WIDTHS = ("d_model", "d_ff", "num_layers", "num_heads")
_PICTURES = ("matplotlib.pyplot",)
"""What a row draws its timeline with."""
_START_SECONDS = 4.0
_SECONDS_A_LAYER = 0.2
"""Of a row: what its operations take to be recorded, about."""


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are tiny where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    presets, contexts = (("small", "medium", "large", "xl", "2.7B"), (128, 256, 512)) if gpu else ((TINY,), (128,))
    add_model_options(parser, presets, contexts)
    add = parser.add_argument
    for name in _WIDTHS:
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N", help="in place of the preset's")
    add("--batch", type=positive, default=4 if gpu else 2, metavar="B", help="sequences (default: %(default)s)")
    add("--model", nargs="+", choices=MODELS, default=[NAIVE], help="what computes attention (default: naive)")
    add("--mode", nargs="+", choices=MODES, default=[*MODES], help="which passes (default: all)")
    add("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES], help="mixed: bfloat16 autocast (default: both)")
    text = "also whole steps at the longest context with so many blocks recomputed together; 0 for none of them"
    every = (1, 2, 3, 4, 6) if gpu else (1, 2)
    add("--checkpoint-every", nargs="+", type=int, default=[*every], metavar="K", help=f"{text} (default: %(default)s)")
    add("--steps", type=positive, default=5 if gpu else 2, metavar="N", help="that are timed (default: %(default)s)")
    add("--tf32", action="store_true", help="let products of float32 use TF32")
    add("--no-snapshots", dest="snapshots", action="store_false", help="keep no pickles for torch's viewer")
    add_run_options(parser, "results/memory")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    check_presets(parser, options)
    if min(options.checkpoint_every) < 0:
        parser.error(f"--checkpoint-every must be at least 0; got {min(options.checkpoint_every)}")
    check_run_options(parser, options)
    for preset in options.preset:
        try:
            _cell(options, preset, options.context[0], MODELS[0], STEP, DTYPES[0]).config.parameters()
        except (TypeError, ValueError) as error:
            parser.error(f"the sizes of {preset} do not fit together: {error}")
    return options


def _cell(
    options: argparse.Namespace, preset: str, context: int, model: str, mode: str, dtype: str, every: int | None = None
) -> Cell:
    others = {name: getattr(options, name) for name in _WIDTHS if getattr(options, name) is not None}
    sizes = {"vocab_size": options.vocab_size, "context_length": context, **others}
    return Cell(preset, options.suite, tuple(sizes.items()), options.batch, model, mode, dtype, every)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order: short contexts first, then steps whose blocks are recomputed."""
    cells = [
        _cell(options, preset, context, model, mode, dtype)
        for preset in options.preset
        for model in options.model
        for context in sorted(options.context)
        for mode in options.mode
        for dtype in options.dtype
    ]
    longest = max(options.context)
    recomputed = [
        _cell(options, preset, longest, model, STEP, dtype, every)
        for preset in options.preset
        for model in options.model
        for dtype in options.dtype
        for every in _block_sizes(options, _cell(options, preset, longest, model, STEP, dtype).config)
    ]
    return cells + (recomputed if STEP in options.mode else [])


def _block_sizes(options: argparse.Namespace, config: TransformerConfig) -> list[int]:
    return sorted({every for every in options.checkpoint_every if 0 < every <= config.num_layers})


def no_room(cell: Cell, rows: Sequence[Row]) -> Outcome | None:
    """Why a cell is not tried: with a shorter context, all else the same, memory ran out."""
    for row in rows:
        same = all(row[name] == getattr(cell, name) for name in ("preset", "suite", "batch", "model", "mode", "dtype"))
        shorter = same and row["every"] == cell.every and row["context"] < cell.context
        if shorter and row["status"] == Status.OUT_OF_MEMORY.value:
            return Outcome(Status.SKIPPED, f"memory ran out at a context of {row['context']} already")
    return None


def configuration_of(options: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {"steps": options.steps, "tf32": options.tf32, "seed": options.seed} | {
        name: getattr(options, name) for name in ("vocab_size", *_WIDTHS)
    }


def tool_of(options: argparse.Namespace) -> Tool[Cell]:
    """What measures the cells, as the options say."""
    conditions = Conditions(
        options.device, options.steps, options.tf32, options.seed, options.output, options.snapshots
    )

    def finish(cell: Cell, found: Row, environment: Environment) -> Row:
        return row_of(cell, found, options)

    def estimate(cell: Cell) -> Estimate:
        seconds = _START_SECONDS + _SECONDS_A_LAYER * cell.config.num_layers
        parts = cell.estimate(options.device.type)
        return Estimate(seconds, parts.total if cell.mode != FORWARD_ONLY else None)

    return Tool(
        "memory.py",
        measure_cell,
        conditions,
        finish,
        write,
        configuration_of(options),
        no_room,
        estimate,
        draw,
        preload=_PICTURES if importlib.util.find_spec("matplotlib") else (),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    return run(tool_of(options), options, cells_of(options))


if __name__ == "__main__":
    sys.exit(main())
