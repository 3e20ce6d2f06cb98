"""Training steps on several GPUs: tokens a second, how near to n times one GPU's, and the memory of each; and the
longest sequence that fits on so many.

    python benchmarks/scaling.py --preset large --processes 1 2 4                # every mode, as much work a GPU
    python benchmarks/scaling.py --preset large --scale strong --parallel context fsdp+context
    python benchmarks/scaling.py --preset medium --longest --recompute-every 1 --loss-chunk 4096
    python benchmarks/scaling.py --preset tiny --context 64 --batch 2 --processes 1 2 --device cpu

Each row is a group of processes of its own, started by torchrun, and is stored when it is measured; --resume goes on
where a run stopped. docs/benchmarking.md says what is measured, and why in this way.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.asked_device import asks_for_gpu
from benchmarks.cell_filter import check_filter, chosen
from benchmarks.isolation import termination_as_interruption
from benchmarks.scaling_cell import LONGEST, SCALES, STEP, STRONG, WEAK, Cell, Job
from benchmarks.scaling_groups import log_of, run_group
from benchmarks.scaling_report import row_of, write
from benchmarks.scaling_search import first_length, search
from benchmarks.suite import (
    add_run_options,
    columns_of_failure,
    environment_of,
    listing,
    opened,
    positive,
    with_environment,
)
from benchmarks.suite_rows import Rows
from benchmarks.training_run import (
    TOKENS,
    add_model_options,
    add_timing_options,
    check_presets,
    timing_configuration,
)
from cs336_systems.parallel.layout import MODES, NONE, WITH_CONTEXT
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.sweep import ConfigurationMismatchError, Outcome, Row, RowStore, Status
from cs336_systems.training.config import TINY

SEVERAL = tuple(mode for mode in MODES if mode != NONE)


def tokens_of_one(gpu: bool) -> int:
    """How many tokens a process has in a step, unless a batch is given."""
    return TOKENS if gpu else 256


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are tiny where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    add_model_options(parser, ["medium", "large"] if gpu else [TINY], [4096 if gpu else 128])
    add = parser.add_argument
    batch = f"{tokens_of_one(gpu)} / context, at least 1; with --longest, 1"
    add("--batch", type=positive, metavar="B", help=f"sequences of a process, or of all if strong (default: {batch})")
    modes = ", ".join(SEVERAL)
    add("--parallel", nargs="+", choices=SEVERAL, metavar="MODE", help=f"of {modes} (default: all that apply)")
    add("--processes", nargs="+", type=positive, default=[1, 2, 4], metavar="N", help="default: %(default)s")
    add("--scale", choices=SCALES, help=f"whether work grows with the processes (default: {WEAK})")
    add("--longest", action="store_true", help="look for the longest sequence that fits, in place of timing steps")
    add("--most", type=positive, default=2**23, metavar="N", help="the longest that is tried (default: %(default)s)")
    add("--bisections", type=int, default=0, metavar="N", help="lengths tried between the last two (default: 0)")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: yes, but not with --longest")
    add("--recompute-every", type=positive, metavar="N", help="as for training")
    add("--loss-chunk", type=positive, metavar="N", help="as for training")
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu", help="default: %(default)s")
    add_timing_options(parser)
    add_run_options(parser, "results/scaling", chooses_device=False)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    check_presets(parser, options)
    check_filter(parser, options)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if options.longest:
        _check_longest(parser, options)
    options.parallel = options.parallel or [*(WITH_CONTEXT if options.longest else SEVERAL)]
    options.scale = STRONG if options.longest else options.scale or WEAK
    options.compile = not options.longest if options.compile is None else options.compile
    return options


def _check_longest(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program where an option says what cannot be together with ``--longest``."""
    if not set(options.parallel or WITH_CONTEXT) <= set(WITH_CONTEXT):
        parser.error(f"--parallel must be of {', '.join(WITH_CONTEXT)} with --longest; got {options.parallel}")
    if options.scale is not None:
        parser.error(f"--scale must not be given with --longest, where all share one sequence; got {options.scale}")
    if len(options.context) > 1:
        parser.error(f"--context must be one length with --longest, to begin with; got {options.context}")


def groups_of(options: argparse.Namespace) -> list[tuple[str, int]]:
    """The modes, each with a number of processes: one alone first, with which the others are compared."""
    counts = sorted(set(options.processes))
    several = [(mode, count) for count in counts if count > 1 for mode in options.parallel]
    return [(NONE, 1)] * (1 in counts) + several


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order; the cells of --longest have the length to begin with."""
    return [
        Cell(
            what=LONGEST if options.longest else STEP,
            preset=preset,
            suite=options.suite,
            vocab_size=options.vocab_size,
            scale=options.scale,
            mode=mode,
            processes=processes,
            context=context,
            batch=options.batch
            or (1 if options.longest else max(1, tokens_of_one(options.device == "cuda") // context)),
            compile=options.compile,
            recompute_every=options.recompute_every,
            loss_chunk=options.loss_chunk,
        )
        for preset in options.preset
        for context in options.context
        for mode, processes in groups_of(options)
    ]


def impossible(cell: Cell, device: str) -> Outcome | None:
    """Why a cell cannot be measured here, as far as that is known before any process is started."""
    reason = None
    if device == "cuda" and cell.processes > torch.cuda.device_count():
        reason = f"this machine has {torch.cuda.device_count()} GPUs"
    elif not cell.shares_sequences and cell.sequences % cell.processes:
        reason = f"{cell.sequences} sequences cannot be divided among {cell.processes} processes"
    elif cell.shares_sequences and cell.length < 2 * cell.processes:
        reason = f"{cell.processes} processes cannot share {cell.length} tokens"
    return Outcome(Status.UNSUPPORTED, reason) if reason else None


class CannotTellError(Exception):
    """A length failed for another reason than memory: whether it fits is not known."""


def look_for_longest(cell: Cell, options: argparse.Namespace, rows: Rows, memory_bytes: int | None) -> None:
    """Measure the lengths of a search, and say what it found."""

    def fits(length: int) -> bool:
        row = rows.of(dataclasses.replace(cell, context=length))
        if row["status"] not in (Status.OK.value, Status.OUT_OF_MEMORY.value):
            raise CannotTellError(f"{row['status']} at {length}: {row['reason']}")
        return bool(row["status"] == Status.OK.value)

    name = f"{cell.preset}, {cell.mode} on {cell.processes}"
    try:
        found = search(fits, first_length(cell, memory_bytes, options.most), options.most, options.bisections)
    except CannotTellError as error:
        rows.progress.note(f"{name}: the search ends with {error}")
    else:
        rows.progress.note(f"{name}: {found.fits or 'nothing'} fits, {found.fails or 'nothing tried'} does not")


def go_through(cells: Sequence[Cell], options: argparse.Namespace, rows: Rows, memory_bytes: int | None) -> int:
    """Measure the cells, or look for the longest from each; the exit status."""
    rows.progress.note(f"results: {options.output}")
    try:
        with termination_as_interruption():
            for cell in cells:
                if cell.what == LONGEST:
                    look_for_longest(cell, options, rows, memory_bytes)
                else:
                    rows.of(cell)
    except KeyboardInterrupt:
        rows.progress.note("interrupted; the same command with --resume goes on")
        return 130
    return 0


def method_of(options: argparse.Namespace) -> list[str]:
    """How rows were measured, in sentences."""
    tf32 = "may use" if options.tf32 else "do not use"
    return [
        f"{options.steps} timed steps after {options.warmup}, of which the first compiles; the longest: one step",
        f"float32 parameters, bfloat16 autocast; products of float32 {tf32} TF32; gradients limited, fused AdamW",
        "weak: each process has as many tokens as one alone, in sequences of its own or in a part of longer ones; "
        "strong: all together have them",
        "MFU is of one GPU, and counts the pairs that the causal mask hides",
        "efficiency: tokens/s over n times those of one process; of the work: the same with operations, for tokens of "
        "longer sequences take more",
        "step times are those of the slowest process, peaks those of the highest",
    ]


def measurer(options: argparse.Namespace, environment: Environment) -> Callable[[Cell], Row]:
    """What measures a cell, and makes its row."""

    def measure(cell: Cell) -> Row:
        refused = impossible(cell, options.device)
        if refused is not None:
            measured = columns_of_failure(refused)
        else:
            job = Job(
                cell=cell,
                device=options.device,
                warmup=options.warmup,
                steps=options.steps,
                tf32=options.tf32,
                seed=options.seed,
                patience=options.limit,
                folder="",
            )
            measured = run_group(job, options.limit, log_of(cell, options.output))
        return row_of(cell, measured, options.tf32, environment.device)

    return measure


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    cells = chosen(cells_of(options), options.filter)
    if options.dry_run:
        print(listing(cells))
        return 0
    try:
        environment = environment_of(torch.device(options.device), options.commit)
        store: RowStore = opened(options, with_environment(timing_configuration(options), environment))
    except (ConfigurationMismatchError, RuntimeError) as error:
        print(f"scaling.py: error: {error}", file=sys.stderr)
        return 2
    environment.write(options.output / "environment.json")

    def write_all() -> None:
        write(options.output, store.rows, environment, method_of(options))

    total = None if options.longest else len(cells)
    rows = Rows(store, measurer(options, environment), write_all, total, environment)
    status = go_through(cells, options, rows, environment.device_memory_bytes)
    write_all()
    rows.progress.note(f"wrote {options.output / 'tables.md'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
