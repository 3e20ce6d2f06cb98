"""The attention leaderboard of Stanford CS336's systems assignment: its one problem, timed as the course times it.

    python benchmarks/leaderboard.py                              # writes into results/leaderboard

bfloat16, causal, q, k and v of shape (16, 16384, 64): an autograd Function under `torch.compile`, forward and then
`o.sum().backward()`, by `triton.testing.do_bench` with a second of warm-up and ten of repetitions. Gradients accumulate
from call to call, as they do there. Before it is timed, the same Function is held to the error budget of the tests on a
shorter problem. `torch`, the same call through `scaled_dot_product_attention`, stands beside it. Without a GPU the
problem is small by default, and the plain PyTorch Function is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.asked_device import asks_for_gpu
from benchmarks.flags import DTYPE_ALIASES, DTYPES
from benchmarks.suite_rows import write_at_once
from cs336_systems.attention import FlashAttentionFunction, TiledAttentionFunction
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.memory import collection_paused
from cs336_systems.profiling.report import format_number, markdown_table, report_page
from cs336_systems.profiling.sweep import Row, Status
from cs336_systems.profiling.timing import call_milliseconds
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

LONGEST_CHECKED = 1024
"""The float64 oracle keeps every pair of a query and a key."""

FIELDS = (
    *("contender", "status", "mean_ms", "median_ms", "min_ms", "tflops", "compiled"),
    *("heads", "length", "head_dim", "dtype"),
)
"""The columns of results.csv, before those of the run."""

FUNCTIONS: dict[str, Any] = {"flash": FlashAttentionFunction, "tiled": TiledAttentionFunction}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Times(NamedTuple):
    """Milliseconds of forward and backward together, over all repetitions."""

    mean: float
    median: float
    fastest: float


def by_function(name: str) -> Attend:
    """Causal attention by one of `FUNCTIONS`, as the assignment calls it."""
    apply = FUNCTIONS[name].apply
    return lambda q, k, v: apply(q, k, v, True)


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by torch, which wants an axis for the batch."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


def check(attend: Attend, options: argparse.Namespace) -> None:
    """Values and gradients on a problem of at most `LONGEST_CHECKED` rows, against float64."""
    length = min(options.length, LONGEST_CHECKED)
    shape = (min(options.heads, 2), length, options.dim)
    inputs = make_inputs(Shapes(shape, shape, shape), dtype=options.dtype, device=options.device)
    assert_within_budget(evaluate(attend, inputs), inputs, causal=True)


def times(attend: Attend, options: argparse.Namespace) -> Times:
    """Forward and backward of the whole problem, many times in a row."""
    shape = (3, options.heads, options.length, options.dim)
    q, k, v = (x.requires_grad_() for x in torch.randn(shape, device=options.device, dtype=options.dtype).unbind())

    def forward_and_backward() -> None:
        loss: Any = attend(q, k, v).sum()
        loss.backward()

    forward_and_backward()  # compiles
    with collection_paused():
        if options.device.type == "cuda":
            from triton.testing import do_bench

            repetitions = do_bench(
                forward_and_backward, warmup=options.warmup * 1e3, rep=options.seconds * 1e3, return_mode="all"
            )
        else:
            first = call_milliseconds(forward_and_backward, options.device)
            count = max(1, int(options.seconds * 1e3 / first))
            repetitions = [call_milliseconds(forward_and_backward, options.device) for _ in range(count)]
    ordered = sorted(repetitions)
    return Times(sum(ordered) / len(ordered), ordered[len(ordered) // 2], ordered[0])


def rows_of(measured: dict[str, Times], options: argparse.Namespace) -> list[Row]:
    """A row for each contender."""
    # Forward two products of all pairs, backward five; causal attention sees half of the pairs.
    flops = 7 * 2 * options.heads * options.length**2 * options.dim / 2
    return [
        {
            "contender": name,
            "status": Status.OK.value,
            "mean_ms": times.mean,
            "median_ms": times.median,
            "min_ms": times.fastest,
            "tflops": flops / times.mean / 1e9,
            "compiled": not options.eager,
            "heads": options.heads,
            "length": options.length,
            "head_dim": options.dim,
            "dtype": str(options.dtype).removeprefix("torch."),
        }
        for name, times in measured.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """A line for each contender."""
    figures = ("mean_ms", "median_ms", "min_ms", "tflops")
    lines = [[row["contender"], *(format_number(row[name]) for name in figures)] for row in rows]
    return markdown_table(["contender", "mean, ms", "median, ms", "fastest, ms", "TFLOP/s by the mean"], lines)


def problem_of(options: argparse.Namespace) -> str:
    """What is timed, in words."""
    shape = (options.heads, options.length, options.dim)
    compiled = "eager" if options.eager else "under torch.compile"
    return f"Causal attention, forward and backward, {compiled}: {shape}, {options.dtype}, {options.device}"


def page(rows: Sequence[Row], options: argparse.Namespace, environment: Environment) -> str:
    """The table for people."""
    method = [
        problem_of(options),
        f"calls in a row for {options.seconds:g} s, after {options.warmup:g} s that are not timed; not interleaved",
        f"values and gradients of {options.impl} were held to the error budget of the tests first",
    ]
    return report_page("The course's leaderboard", environment, method, [table(rows)])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = asks_for_gpu(arguments)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if on_gpu else "cpu"))
    parser.add_argument(
        "--impl", default="flash" if on_gpu else "tiled", choices=FUNCTIONS, help="default: %(default)s"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=[*DTYPES, *DTYPE_ALIASES], help="default: %(default)s")
    for name, value in (("heads", 16 if on_gpu else 2), ("length", 16384 if on_gpu else 256), ("dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default: %(default)s")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0 if on_gpu else 1.0, help="default: %(default)s")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--alone", action="store_true", help="without torch beside it")
    parser.add_argument("--output", type=Path, default=Path("results/leaderboard"), help="default: %(default)s")
    parser.add_argument("--commit", help="the commit to record where the checkout is not in a git repository")
    options = parser.parse_args(arguments)
    options.dtype = DTYPES[DTYPE_ALIASES.get(options.dtype, options.dtype)]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print the table, and write it."""
    options = parse(arguments)
    environment = collect_environment(options.device, commit=options.commit)
    contenders: dict[str, Attend] = {options.impl: by_function(options.impl)}
    if not options.alone:
        contenders["torch"] = by_torch
    check(contenders[options.impl], options)
    print(problem_of(options))
    measured = {
        name: times(attend if options.eager else torch.compile(attend), options) for name, attend in contenders.items()
    }
    rows = rows_of(measured, options)
    print(table(rows))
    print(f"wrote {write_at_once(options.output, rows, FIELDS, environment, page(rows, options, environment))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
