"""Search tile configurations of the portable Triton kernels on this GPU, and print rows for their tables.

    python benchmarks/tune.py                                        # every kernel and head dimension, 16-bit inputs
    python benchmarks/tune.py --kernels dq dkdv --head-dims 128 --dtypes fp32 --timeout 500
    python benchmarks/tune.py --lengths 512 --batch 8 --heads 1      # a grid for half of the GPU's SMs or fewer
    python benchmarks/tune.py --with-mods --head-dims 64 128         # the rows for masks and score changes

Candidates that may fit are compiled in --jobs processes, where results must be within the tests' error budget. The
right ones are timed once, and the best again in turns with the table's row. The score is the geometric mean of the
times with a causal and a full mask, or with --with-mods a window, slopes, a bias and documents. The winner is right at
lengths that are multiples of no tile, too. A row takes about --timeout seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch
from torch import Tensor

from benchmarks.lib import flags, harness
from benchmarks.lib.harness import Comparison, Context, Program, Row, run_excluding
from benchmarks.lib.isolation import map_isolated, run_isolated
from benchmarks.lib.results import error
from benchmarks.lib.tables import markdown
from benchmarks.parts.tune_candidates import KERNELS, TableRow, TileConfig, candidates, tiles
from cs336_systems.attention import attention, variants
from cs336_systems.profiling.timing import TimingMethod, measure_ms
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

Others = Mapping[str, TileConfig]
"""Configurations of the other kernel of the backward pass, which runs with the one that is tried."""
MASKS, MODS = ("causal", "full"), ("window", "slopes", "bias", "documents")
MODS_TABLE = "WITH_MODS"
RAGGED = (1, 2, 333, 405)
"""Batch, heads, and lengths of q and k that are multiples of no tile."""
FIRST = TimingMethod(rounds=1, warmup_ms=3.0, repetitions_ms=10.0, pause_ms=20.0)
_COMPILING_SHARE = 0.7  # of a row's time; the rest is for measuring
_HEAD_DIMS = [16, 32, 64, 128, 256]


def arguments_of(mask: str, q: Tensor, k_len: int) -> tuple[bool | str, dict[str, Any]]:
    """``causal`` and the further arguments of `attention` for one of `MASKS` or `MODS`."""
    *_, heads, q_len, _ = q.shape
    if mask in MASKS:
        return (mask == "causal" and "bottom_right"), {}
    if mask == "window":
        return True, {"window": (k_len // 4, None)}
    if mask == "slopes":
        return True, {"alibi_slopes": torch.logspace(-1, -8, heads, 2.0, device=q.device)}
    if mask == "bias":
        return True, {"bias": torch.randn(heads, q_len, k_len, device=q.device, dtype=q.dtype)}
    documents = [(torch.arange(length, device=q.device) * 5 // length)[None] for length in (q_len, k_len)]
    return True, {"mask": variants.document(*documents).with_blocks(q_len, k_len, causal=True)}


def check(
    config: TileConfig, row: TableRow, others: Others, sizes: tuple[int, int, int, int], device: torch.device
) -> None:
    """Raise AssertionError if results exceed the error budget; ``sizes`` are batch, heads, and lengths of q and k."""
    torch.set_float32_matmul_precision("highest")
    batch, heads, q_len, k_len = sizes
    shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=row.head_dim, q_heads=heads)
    generator = torch.Generator(device).manual_seed(0)
    inputs = make_inputs(shapes, dtype=row.dtype, device=device, generator=generator)
    with tiles().pin(**others, **{row.kernel: config}):
        for mask in MODS if row.mods else MASKS:
            causal, features = arguments_of(mask, inputs.q, k_len)
            results = evaluate(functools.partial(attention, impl="flash", causal=causal), inputs, features)
            assert_within_budget(results, inputs, causal=causal, features=features)


def reduced(size: int, enough: int) -> int:
    """About ``enough``, at most ``size``, with the same code from Triton, which distinguishes 1 and multiples of 16."""
    return size if size <= enough else enough + size % 16


def run_of(row: TableRow, mask: str, tensors: Sequence[Tensor]) -> Callable[[], object]:
    """A function that runs the kernel once: the forward pass, or the backward pass, which runs both others."""
    q, k, v, gradient = tensors
    causal, features = arguments_of(mask, q, row.length)
    attend = functools.partial(attention, causal=causal, impl="flash", **features)
    if row.kernel == "forward":
        return lambda: attend(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return functools.partial(torch.autograd.grad, attend(*leaves), leaves, gradient, retain_graph=True)


def time_candidates(
    row: TableRow,
    configs: Sequence[TileConfig],
    others: Others,
    method: TimingMethod,
    deadline: float,
    context: Context,
) -> list[Row]:
    """A row for each configuration and mask, timed in turns; the first configuration is the baseline."""
    device, comparison = context.options.device, Comparison(context)
    shape = (row.batch, row.heads, row.length, row.head_dim)
    tensors = [torch.randn(shape, device=device, dtype=row.dtype) for _ in range(4)]

    def measure_one(config: TileConfig, mask: str) -> float:
        if time.monotonic() > deadline:
            raise TimeoutError("no time was left")
        with tiles().pin(**others, **{row.kernel: config}):
            call = run_of(row, mask, tensors)
            call()
            return measure_ms(call, device=device, method=method)

    pairs = itertools.product(configs, MODS if row.mods else MASKS)
    named = {f"{config} {mask}": (config, mask) for config, mask in pairs}
    for name in named:
        comparison.attempt(name, "start", lambda: None)  # an excluded one fails
    comparison.interleave({name: functools.partial(measure_one, *pair) for name, pair in named.items()}, method)
    return [
        {"mask": mask, **vars_of(config, row), **comparison.columns(name)}
        | comparison.speedup_columns("speedup", name, f"{configs[0]} {mask}")
        for name, (config, mask) in named.items()
    ]


def vars_of(config: TileConfig, row: TableRow) -> Row:
    """The columns of a configuration, with the number of programs of its grid."""
    programs = config.programs(row.kernel, row.length, row.batch * row.heads)
    return {"tiles": str(dataclasses.astuple(config)), **dataclasses.asdict(config), "programs": programs}


def scores(rows: Sequence[Row]) -> dict[str, float]:
    """By tiles, the geometric mean of the times over the masks, of those that have them all; the best first."""
    by_tiles: dict[str, list[Any]] = {}
    for row in rows:
        by_tiles.setdefault(row["tiles"], []).append(row["median_ms"])
    means = {name: statistics.geometric_mean(times) for name, times in by_tiles.items() if all(times)}
    return dict(sorted(means.items(), key=lambda pair: pair[1]))


def measure(row: TableRow, context: Context) -> list[Row]:
    """All checks and times of a row's candidates, and the winner. Raises RuntimeError if none could be measured."""
    options, begin, device = context.options, time.monotonic(), context.options.device
    others, names = {}, [field.name for field in dataclasses.fields(tiles().TileConfig)]
    for r in context.rows:
        if r.get("stage") == "winner" and all(r[n] == value for n, value in row.columns.items() if n != "kernel"):
            others[r["kernel"]] = tiles().TileConfig(*(r[name] for name in names))
    now = tiles().lookup(row.kernel, row.precision, row.head_dim, device, row.length, row.batch * row.heads, row.mods)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    tried = candidates(row, now, torch.cuda.get_device_capability(device), limit)[: options.candidates]
    sizes = (reduced(row.batch, 16), reduced(row.heads, 16), *[reduced(row.length, 512)] * 2)
    jobs = [(config, row, others, sizes, device) for config in tried]
    rows, right = [], []
    for (config, *_), finished in map_isolated(check, jobs, processes=options.jobs, limit=options.candidate_timeout):
        if finished.failure:
            rows.append({"stage": "check", **vars_of(config, row), **error(finished.failure).columns})
        else:
            right.append(config)
        if time.monotonic() > begin + options.timeout * _COMPILING_SHARE:
            break
    right.sort(key=tried.index)
    if not right:
        return rows

    def timed(configs: Sequence[TileConfig], method: TimingMethod, deadline: float) -> list[Row]:
        finished = run_excluding(time_candidates, row, configs, others, method, deadline, context=context)
        if finished.failure:
            raise RuntimeError(finished.failure)
        return finished.result

    first = timed(right, FIRST, begin + options.timeout)
    best = [*scores(first)][: options.finalists]
    finalists = [now, *(config for config in right if config != now and vars_of(config, row)["tiles"] in best)]
    # These take seconds, and without them all before would be in vain: they may end after the deadline.
    method = dataclasses.replace(FIRST, rounds=options.rounds, repetitions_ms=15.0)
    final = timed(finalists, method, math.inf)
    rows += [{"stage": "first", **r} for r in first] + [{"stage": "final", **r} for r in final]
    by_tiles = {vars_of(config, row)["tiles"]: config for config in finalists}
    for config in (by_tiles[name] for name in scores(final)):
        seconds = 2 * options.candidate_timeout
        failure = run_isolated(check, config, row, others, RAGGED, device, limit=seconds).failure
        if not failure:
            return [*rows, {"stage": "winner", **vars_of(config, row), "table": table_of(row, device)}]
        rows.append({"stage": "ragged check", **vars_of(config, row), **error(failure).columns})
    return rows


def table_of(row: TableRow, device: torch.device) -> str:
    """The table that a row belongs to: grids for half of the SMs or fewer have their own."""
    usual = tiles().lookup(row.kernel, row.precision, row.head_dim, device)
    programs = usual.programs(row.kernel, row.length, row.batch * row.heads)
    few = 2 * programs <= torch.cuda.get_device_properties(device).multi_processor_count
    return MODS_TABLE if row.mods else "SMALL_GRIDS" if few else "TABLES"


def tables(frame: pd.DataFrame) -> str:
    """For each row of a table the line to paste, and its finalists with their speed-up over the present row."""
    parts = []
    for name, rows in frame.groupby("case", sort=False):
        parts.append(f"## {name}")
        stages = rows.get("stage", pd.Series(index=rows.index, dtype=object))
        for winner in rows[stages == "winner"].to_dict("records"):
            row = TableRow(**{field.name: winner[field.name] for field in dataclasses.fields(TableRow)})
            parts.append(f"For `{winner['table']}`:\n\n```\n{row.key}: TileConfig{winner['tiles']},\n```")
        final = rows[(stages == "final") & (rows["status"] == "ok")]
        if len(final):
            final = final.rename(columns={"median_ms": "ms", "speedup": "× the present row"})
            parts.append(markdown(final[["tiles", "programs", "mask", "ms", "× the present row"]]))
    return "\n\n".join(parts)


def drive(sweep: harness.Sweep[TableRow], cases: Sequence[TableRow]) -> None:
    """Search one row after the other, and print each result."""
    for case in cases:
        sweep.note(tables(pd.DataFrame(sweep.rows(case))))


PROGRAM = Program(
    "tune",
    "Tile configurations",
    measure,
    tables,
    settings=("seed", "rounds", "candidates", "finalists"),
    preload=("triton",),
    isolated=False,
)


_USUAL = (
    "--lengths 4096 --head-dims 16 32 64 128 256 --dtypes bf16 --kernels forward dq dkdv --tokens 16384 --channels 2048"
)
_USUAL += " --batch --heads --rounds 5 --jobs 12"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.make_parser(__doc__, _USUAL, timeout=900.0)
    add, count = parser.add_argument, flags.positive
    add("--with-mods", action="store_true", help="search the rows for masks and score changes")
    add("--candidates", type=count, default=400, metavar="N", help="candidates of a row (default: %(default)s)")
    text = "candidates that are timed again (default: %(default)s)"
    add("--finalists", type=count, default=6, metavar="N", help=text)
    text = "seconds that a candidate may take to compile and run (default: %(default)g)"
    add("--candidate-timeout", type=flags.seconds, default=90.0, metavar="S", help=text)
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, kernels=KERNELS, head_dims=_HEAD_DIMS)
    if options.jobs == 0:
        parser.error("--jobs must be at least 1; got 0")
    return options


def rows_of(options: argparse.Namespace) -> list[TableRow]:
    """The rows, the kernels of one head dimension one after the other."""
    precisions = dict.fromkeys("float32" if dtype == "float32" else "half" for dtype in options.dtypes)
    rows = []
    for precision, dim, length, kernel in itertools.product(
        precisions, options.head_dims, options.lengths, options.kernels
    ):
        batch, heads = (
            options.batch or max(1, options.tokens // length),
            options.heads or max(1, options.channels // dim),
        )
        rows.append(TableRow(kernel, precision, dim, batch, heads, length, options.with_mods))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device.type != "cuda" and not options.dry_run:
        print(f"tune.py: error: --device must be a CUDA GPU; got {options.device}", file=sys.stderr)
        return 2
    return harness.run(PROGRAM, options, rows_of(options), drive)


if __name__ == "__main__":
    sys.exit(main())
