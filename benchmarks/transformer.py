"""The time of a model's passes, each within one step: forward, backward, and AdamW's update, and the whole.

    python benchmarks/transformer.py                                           # a first look, GPU or not
    python benchmarks/transformer.py --preset small medium --context-length 512 1024 --dtype float32 bfloat16
    python benchmarks/transformer.py --preset small --mode step --warmup 0 1 2 5 --compile none model
    python benchmarks/transformer.py --compare-compile                         # eager against compiled, four sizes
    python benchmarks/transformer.py --d-model 512 --d-ff 2048 --num-layers 6 --num-heads 8 --log-steps

Each row is measured in a process of its own, and is stored when it is measured; --resume goes on where a run stopped.
docs/measuring/steps.md says what is measured, and why in this way.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.asked_device import asks_for_gpu
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, positive, run
from benchmarks.training_models import COMPILE, NOTHING, WHOLE, config_of, modules_for, names_of, start_seconds
from benchmarks.transformer_cell import DTYPES, SIZES, TF32, Cell, Conditions, log_lines, measure_cell, row_of
from benchmarks.transformer_report import draw, write
from cs336_systems.attention.choose import NAMES
from cs336_systems.profiling.environment import Environment, device_name
from cs336_systems.profiling.flops import device_peak
from cs336_systems.profiling.steps import MODES
from cs336_systems.profiling.sweep import Outcome, Row, Status
from cs336_systems.training.config import TINY
from cs336_systems.training.estimate import estimate_memory
from cs336_systems.transformer import PRESETS, TransformerConfig
from cs336_systems.transformer.presets import VOCAB_SIZE

COMPARED = ("4-256-256-4-8", "4-512-512-6-8", "8-256-768-6-12", "8-512-768-12-12")
"""Sizes at which eager and compiled models are compared: batch-context-width-layers-heads."""
CUSTOM = "custom"
_FIVE_SIZES = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")
_USUAL_PART_OF_PEAK = 0.3


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are tiny where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    add = parser.add_argument
    add("--preset", nargs="+", metavar="NAME", help="or five sizes, as --compare-compile has them")
    add("--suite", default="2025", choices=PRESETS, help="that presets belong to (default: %(default)s)")
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=positive, metavar="N", help=f"in place of the preset's {name}")
    contexts = "128 256 512 1024" if gpu else "32 64"
    add("--context-length", dest="context", nargs="+", type=positive, metavar="N", help=f"default: {contexts}")
    add("--batch-size", dest="batch", nargs="+", type=positive, metavar="B", help="default: 4")
    add("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="tf32 is float32 that may use TF32")
    add("--attn", nargs="+", choices=NAMES, default=["auto"], help="what computes attention (default: auto)")
    add("--compile", nargs="+", choices=COMPILE, default=[NOTHING], help="what torch.compile is given (default: none)")
    add("--mode", nargs="+", choices=MODES, default=["forward", "step"], help="default: forward and step")
    add("--warmup", nargs="+", type=_not_negative, metavar="N", help="steps before those that are timed (default: 5)")
    add("--steps", type=positive, default=10, metavar="N", help="that are timed (default: %(default)s)")
    add("--compare-compile", action="store_true", help=f"--preset {' '.join(COMPARED)} --compile none model")
    add("--log-steps", action="store_true", help="print the time of every step")
    add_run_options(parser, "results/transformer")
    parser.set_defaults(warmup=[5] if gpu else [1])
    return parser


def _not_negative(text: str) -> int:
    return 0 if text == "0" else positive(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    check_run_options(parser, options)
    gpu = options.device.type == "cuda"
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if options.compare_compile:
        if options.preset is not None:
            parser.error("--compare-compile has sizes of its own; leave out --preset")
        options.preset, options.compile = [*COMPARED], [NOTHING, WHOLE]
    if options.preset is None:
        missing = [f"--{name.replace('_', '-')}" for name in SIZES[:4] if name not in sizes]
        if len(missing) not in (0, 4):
            parser.error(f"sizes without --preset need {', '.join(missing)} too")
        options.preset = [CUSTOM] if not missing else ["small" if gpu else TINY]
    if any(map(_FIVE_SIZES.fullmatch, options.preset)) and (options.context or options.batch):
        parser.error("sizes as batch-context-width-layers-heads leave no --context-length and --batch-size to choose")
    options.context = options.context or ([128, 256, 512, 1024] if gpu else [32, 64])
    options.batch = options.batch or [4]
    try:
        options.cells = cells_of(options, sizes)
    except ValueError as error:
        parser.error(str(error))
    return options


def models_of(name: str, options: argparse.Namespace, sizes: dict[str, int]) -> list[tuple[str, int, dict[str, Any]]]:
    """What a name of --preset stands for: batches, and arguments of a `TransformerConfig` with each context.

    Raises:
        ValueError: it is no name.
    """
    if five := _FIVE_SIZES.fullmatch(name):
        batch, context, width, layers, heads = map(int, five.groups())
        found = {"d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
        return [(name, batch, {"vocab_size": VOCAB_SIZE, **found, "context_length": context} | sizes)]
    works = [(batch, context) for batch in options.batch for context in sorted(options.context)]
    if name == CUSTOM:
        return [
            (name, batch, {"vocab_size": VOCAB_SIZE, **sizes, "context_length": context}) for batch, context in works
        ]
    if name not in names_of(options.suite):
        known = ", ".join(names_of(options.suite))
        raise ValueError(f"--preset must be one of {known} with --suite {options.suite}; got {name}")
    said = f"{name} ({options.suite})" if name in PRESETS[options.suite] else name
    return [
        (said, batch, {"vocab_size": VOCAB_SIZE} | sizes | {"context_length": context, "preset": name})
        for batch, context in works
    ]


def cells_of(options: argparse.Namespace, sizes: dict[str, int]) -> list[Cell]:
    """What is measured, in this order: short contexts before longer ones, and modes that take less before others.

    Raises:
        ValueError: a name or sizes cannot be.
    """
    cells = []
    for name in options.preset:
        for said, batch, arguments in models_of(name, options, sizes):
            for attn in options.attn:
                config = _config(arguments, options.suite, attn)
                cells += [
                    Cell(said, config, batch, arithmetic, how, mode, warmup)
                    for arithmetic in options.dtype
                    for how in options.compile
                    for mode in MODES
                    if mode in options.mode
                    for warmup in options.warmup
                ]
    return cells


def _config(arguments: dict[str, Any], suite: str, attn: str) -> TransformerConfig:
    if "preset" in arguments:
        changes = {name: value for name, value in arguments.items() if name != "preset"}
        return config_of(arguments["preset"], suite, attn, **changes)
    return TransformerConfig(**arguments, attn=attn)


def no_room(cell: Cell, rows: Sequence[Row]) -> Outcome | None:
    """Why a cell is not tried: memory ran out in the same series already.

    A series has the same model, attention, arithmetic and compilation; in it, shorter sequences, fewer of them, and
    fewer phases take less memory.
    """
    mine = cell.identity
    series = [name for name in mine if name not in ("batch", "context", "mode", "warmup")]
    for row in rows:
        if row["status"] != Status.OUT_OF_MEMORY.value or any(row[name] != mine[name] for name in series):
            continue
        fewer_phases = MODES.index(row["mode"]) <= MODES.index(cell.mode)
        if fewer_phases and row["context"] <= mine["context"] and row["batch"] <= cell.batch:
            reason = f"memory ran out at {row['batch']} × {row['context']} already, {row['mode']}"
            return Outcome(Status.SKIPPED, reason)
    return None


def tool_of(options: argparse.Namespace) -> Tool[Cell]:
    """What measures the cells, as the options say."""
    conditions = Conditions(options.device, options.steps, options.seed)

    def finish(cell: Cell, found: Row, environment: Environment) -> Row:
        if options.log_steps:
            print("\n".join(log_lines(cell, found)), flush=True)
        return row_of(cell, found, environment, conditions)

    def estimate(cell: Cell) -> Estimate:
        return Estimate(_seconds(cell, options), _bytes(cell))

    return Tool(
        "transformer.py",
        measure_cell,
        conditions,
        finish,
        write,
        {"steps": options.steps, "seed": options.seed},
        no_room,
        estimate,
        draw,
        preload=modules_for((), options.compile),
    )


def _seconds(cell: Cell, options: argparse.Namespace) -> float | None:
    """At the part of the peak that training usually reaches; None where the peak is not known."""
    peak = device_peak(device_name(options.device))
    limit = None if peak is None else peak.rate(cell.dtype_name, tf32=cell.arithmetic == TF32)
    if limit is None:
        return None
    passes = 1 if cell.mode == MODES[0] else 3
    steps = (cell.warmup + options.steps) * passes * cell.flops / (_USUAL_PART_OF_PEAK * limit * 1e12)
    return start_seconds(cell.compile, cell.config.num_layers) + steps


def _bytes(cell: Cell) -> int:
    """What the trainer estimates of a step, or those parts of it that the mode has."""
    estimated = estimate_memory(cell.config, cell.batch, autocast=cell.dtype != torch.float32)
    if cell.mode == MODES[0]:
        one_block = estimated.blocks // cell.config.num_layers
        return estimated.parameters + estimated.narrow_weights + one_block + estimated.loss
    return estimated.total - (estimated.optimizer if cell.mode == MODES[1] else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    return run(tool_of(options), options, options.cells)


if __name__ == "__main__":
    sys.exit(main())
