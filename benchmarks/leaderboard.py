"""The attention leaderboard of Stanford CS336's systems assignment: one problem, timed as the course times it.

    python benchmarks/leaderboard.py
    python benchmarks/leaderboard.py --providers flash --compile none

Causal bfloat16 attention, q, k and v of shape (16, 16384, 64): an autograd Function under `torch.compile`, forward and
then `o.sum().backward()`, by `triton.testing.do_bench` with a second of warm-up and ten seconds of repetitions.
Gradients accumulate from call to call, as in the course. Before it is timed, each Function must satisfy the error
budget of the tests on a shorter problem. `torch` is `scaled_dot_product_attention`. Without a GPU the problem is small
by default, and the Function in plain PyTorch is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib import flags, harness
from benchmarks.lib.comparison import time_columns
from benchmarks.lib.harness import Case, Context, Row
from benchmarks.lib.tables import markdown
from cs336_systems.attention import FlashAttentionFunction, TiledAttentionFunction
from cs336_systems.kernels.garbage import collection_paused
from cs336_systems.profiling.environment import device_name
from cs336_systems.profiling.flops import attention_flops, implausible_rate, teraflops_per_second
from cs336_systems.profiling.timing import RoundTimes, call_milliseconds
from cs336_systems.profiling.torch_names import COMPILER
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs

LONGEST_CHECKED = 1024
"""The float64 reference keeps every query-key pair."""
FUNCTIONS: dict[str, Any] = {"flash": FlashAttentionFunction, "tiled": TiledAttentionFunction}
TORCH = "torch"
COMPILE = ("none", "whole")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem(Case):
    """Causal attention without a batch axis, forward and backward, by one provider."""

    provider: str
    compile: str
    dtype: str
    heads: int
    length: int
    head_dim: int


def attend_of(provider: str) -> Attend:
    """Causal attention by one of `FUNCTIONS`, called as in the assignment, or by torch."""
    if provider == TORCH:
        return lambda q, k, v: F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    apply = FUNCTIONS[provider].apply
    return lambda q, k, v: apply(q, k, v, True)


def check(attend: Attend, case: Problem, device: torch.device) -> None:
    """Raise AssertionError if output or gradients exceed the error budget on a problem of `LONGEST_CHECKED` rows."""
    shape = (min(case.heads, 2), min(case.length, LONGEST_CHECKED), case.head_dim)
    inputs = make_inputs(Shapes(shape, shape, shape), dtype=flags.DTYPES[case.dtype], device=device)
    assert_within_budget(evaluate(attend, inputs), inputs, causal=True)


def measure(case: Problem, context: Context) -> Row:
    """Check the provider, and time forward and backward together."""
    options, attend = context.options, attend_of(case.provider)
    device: torch.device = options.device
    if case.provider != TORCH:
        check(attend, case, device)
    call: Attend = torch.compile(attend) if case.compile == "whole" else attend
    shape = (3, case.heads, case.length, case.head_dim)
    inputs = torch.randn(shape, device=device, dtype=flags.DTYPES[case.dtype]).unbind()
    q, k, v = (x.requires_grad_() for x in inputs)

    def forward_and_backward() -> None:
        loss: Any = call(q, k, v).sum()
        loss.backward()

    forward_and_backward()  # compiles
    row = time_columns(RoundTimes(tuple(repetitions(forward_and_backward, options))))
    del row["round_ms"]  # hundreds
    flops = attention_flops(1, case.heads, case.length, case.length, case.head_dim, causal=True, which="both")
    rate = teraflops_per_second(flops, row["mean_ms"])
    warning = implausible_rate(rate, device_name(device), case.dtype, tf32=False)
    return {**row, "tflops": rate, "warning": warning or ""}


def repetitions(function: Callable[[], None], options: argparse.Namespace) -> list[float]:
    """Milliseconds of calls in a row: --rep of them after --warmup."""
    with collection_paused():
        if options.device.type == "cuda":
            from triton.testing import do_bench

            return do_bench(function, warmup=options.warmup, rep=options.rep, return_mode="all")
        count = max(1, int(options.rep / call_milliseconds(function, options.device)))
        return [call_milliseconds(function, options.device) for _ in range(count)]


def tables(frame: pd.DataFrame) -> str:
    """One table of all rows; the rate is that of the mean time."""
    figures = ["mean_ms", "median_ms", "min_ms", "tflops", "status"]
    return markdown(frame.reindex(columns=[*(field.name for field in dataclasses.fields(Problem)), *figures]))


PROGRAM = harness.Program(
    name="leaderboard",
    title="The course's leaderboard",
    measure=measure,
    tables=tables,
    settings=("warmup", "rep", "seed"),
    notes=(
        "causal attention, forward and backward",
        "{rep:g} ms of calls in a row after {warmup:g} ms of warm-up; not interleaved",
        "output and gradients of this library's Functions satisfy the error budget of the tests",
    ),
    preload=COMPILER,
)


_USUAL = "--compile whole --dtypes bf16 --head-dims 64 --warmup 1000"
_ON_A_GPU = "--providers flash torch --heads 16 --lengths 16384 --rep 10000"
_WITHOUT = "--providers tiled torch --heads 2 --lengths 256 --rep 1000"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, providers=[*FUNCTIONS, TORCH], compile=COMPILE)
    if not options.heads:
        parser.error("--heads must be at least 1; got 0")
    axes = (options.compile, options.dtypes, options.head_dims, options.lengths, options.providers)
    cases = [
        Problem(provider, how, dtype, options.heads, length, head_dim)
        for how, dtype, head_dim, length, provider in itertools.product(*axes)
    ]
    return harness.run(PROGRAM, options, cases)


if __name__ == "__main__":
    sys.exit(main())
