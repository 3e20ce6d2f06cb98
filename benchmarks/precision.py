"""Precision: sums that lose terms, the dtypes of a toy model under autocast, and attention's error against float64.

    python benchmarks/precision.py                                              # all three; short without a GPU
    python benchmarks/precision.py --what accumulation autocast
    python benchmarks/precision.py --what attention --dtype bf16 fp32 --length 512 4096 --dim 64 128 --mask causal full

An error is that of the output, the log-sum-exp or a gradient, as a norm and as the largest of its elements, and stands
beside the budget that the tests hold it to. docs/measuring/precision.md says what is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked_device import asks_for_gpu
from benchmarks.flags import DTYPE_ALIASES, DTYPES, MASKS
from benchmarks.precision_cells import (
    ACCUMULATION,
    ATTENTION,
    AUTOCAST,
    KINDS,
    Cell,
    Conditions,
    measure_cell,
    quadratic_bytes,
)
from benchmarks.precision_report import draw, write
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, positive, run
from cs336_systems.attention import Implementation
from cs336_systems.kernels.torch_names import COMPILER
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.sweep import Row

_AUTOCAST_DTYPES = ("float16", "bfloat16")
# A context on the GPU and, for attention, compilation for a new length.
_START_SECONDS = {ACCUMULATION: 3.0, AUTOCAST: 3.0, ATTENTION: 8.0}


def build_parser(arguments: Sequence[str] | None = ()) -> argparse.ArgumentParser:
    """The parser; its defaults are small where the arguments ask for no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    names = [implementation.value for implementation in Implementation]
    implementations = names if gpu else [name for name in names if name != "compiled"]  # it compiles for minutes
    add = parser.add_argument
    add("--what", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND", help=f"of {', '.join(KINDS)}")
    dtypes = [*DTYPES, *DTYPE_ALIASES]
    add("--dtype", nargs="+", choices=dtypes, default=[*DTYPES], metavar="TYPE", help=f"of {', '.join(dtypes)}")
    lengths, dims = ((512, 2048), (64, 128)) if gpu else ((128, 512), (64,))
    add("--length", nargs="+", type=positive, default=[*lengths], metavar="N", help="default: %(default)s")
    add("--dim", nargs="+", type=positive, default=[*dims], metavar="D", help="head dimensions (default: %(default)s)")
    masks = [*MASKS] if gpu else ["causal"]
    add("--mask", nargs="+", choices=MASKS, default=masks, metavar="MASK", help=f"of {', '.join(MASKS)} (%(default)s)")
    add("--impl", nargs="+", choices=names, default=implementations, metavar="NAME", help=f"of {', '.join(names)}")
    add("--batch", type=positive, default=1, metavar="B", help="default: %(default)s")
    add("--heads", type=int, default=2, metavar="H", help="0: no head axis (default: %(default)s)")
    add("--tf32", action="store_true", help="let products of float32 use TF32, and allow for it in the budget")
    add_run_options(parser, "results/precision")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with a message for what cannot be done."""
    parser = build_parser(arguments)
    options = parser.parse_args(arguments)
    if options.heads < 0:
        parser.error(f"--heads must be at least 0; got {options.heads}")
    options.dtype = list(dict.fromkeys(DTYPE_ALIASES.get(name, name) for name in options.dtype))
    check_run_options(parser, options)
    return options


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order."""
    cells = [Cell(ACCUMULATION)] if ACCUMULATION in options.what else []
    if AUTOCAST in options.what:
        cells += [Cell(AUTOCAST, dtype) for dtype in _AUTOCAST_DTYPES]
    if ATTENTION in options.what:
        cells += [
            Cell(ATTENTION, dtype, mask, length, dim)
            for dtype in options.dtype
            for mask in options.mask
            for dim in options.dim
            for length in sorted(options.length)
        ]
    return cells


def configuration_of(options: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {name: getattr(options, name) for name in ("batch", "heads", "impl", "tf32", "seed")}


def method_of(options: argparse.Namespace) -> list[str]:
    """How rows were measured, in sentences."""
    tf32 = "may use" if options.tf32 else "do not use"
    heads = f"{options.heads} heads" if options.heads else "no head axis"
    return [
        "sums: the CPU's, in order, each term rounded to its dtype first",
        f"attention: batch {options.batch}, {heads}, normal random numbers, seed {options.seed}; float32 products "
        f"{tf32} TF32",
        "exact results are float64's, from the very numbers of the dtype; gradients are those of the output alone",
        "a budget is twice naive's error in the same dtype, and the rounding of the result and of its terms",
    ]


def tool_of(options: argparse.Namespace) -> Tool[Cell]:
    """What measures the cells, as the options say."""
    conditions = Conditions(
        options.device, tuple(options.impl), options.batch, options.heads, options.seed, options.tf32
    )

    def finish(cell: Cell, measured: Row, environment: Environment) -> Row:
        problem: Row = {}
        if cell.kind == ATTENTION:
            problem = {"mask": cell.mask, "length": cell.length, "head_dim": cell.head_dim}
            problem |= {"batch": options.batch, "heads": options.heads, "tf32": options.tf32, "seed": options.seed}
        return {"kind": cell.kind, "dtype": cell.dtype, **problem, **measured}

    def write_all(folder: Path, rows: Sequence[Row], environment: Environment) -> None:
        write(folder, rows, environment, method_of(options))

    def estimate(cell: Cell) -> Estimate:
        return Estimate(_START_SECONDS[cell.kind], quadratic_bytes(cell, options.batch, options.heads))

    return Tool(
        "precision.py",
        measure_cell,
        conditions,
        finish,
        write_all,
        configuration_of(options),
        estimate=estimate,
        draw=draw,
        preload=COMPILER if Implementation.COMPILED.value in options.impl else (),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 130 when interrupted."""
    options = parse(arguments)
    return run(tool_of(options), options, cells_of(options))


if __name__ == "__main__":
    sys.exit(main())
