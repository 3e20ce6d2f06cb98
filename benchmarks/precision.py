"""Precision: sums that lose terms, the dtypes of a small model under autocast, and attention's errors.

    python benchmarks/precision.py                                            # all three; short without a GPU
    python benchmarks/precision.py --topics sums autocast
    python benchmarks/precision.py --topics attention --dtypes bf16 fp32 --lengths 512 4096 --masks causal full

Errors of attention are those of the output, the log-sum-exp and the gradients against float64, with the budget of the
tests. docs/measuring/precision.md says what is measured, and what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib import flags, harness
from benchmarks.lib.comparison import Comparison
from benchmarks.lib.harness import Case, Context, Row
from benchmarks.lib.results import outcome_of
from benchmarks.lib.tables import markdown, plot_lines, sections, with_columns
from cs336_systems.attention import Implementation, attention
from cs336_systems.profiling import ACCUMULATIONS, tensor_dtypes
from cs336_systems.profiling.report import ABSENT
from cs336_systems.profiling.torch_names import COMPILER
from cs336_systems.testing import TF32_EPS, Budget, Finding, Inputs, Shapes, budget_of, compare, evaluate, make_inputs

SUMS, AUTOCAST, ATTENTION = TOPICS = ("sums", "autocast", "attention")
RESULTS = ("out", "lse", "dq", "dk", "dv")
_LARGEST = ("largest", "largest_budget")
IMPLEMENTATIONS = tuple(implementation.value for implementation in Implementation)
WITHOUT_LSE = ("sdpa",)
WITH_NARROW_SCORES = ("naive", "compiled")
"""Their scores, and so their log-sum-exp, have the dtype of q and k, while the budget is float32's."""
_QUADRATIC_MATRICES = 16
"""Of float64 at most, in the reference and in naive's graph."""


@dataclass(frozen=True)
class PrecisionCase(Case):
    """A topic: all sums, autocast to one dtype, or one attention problem, of integer sizes, for all implementations."""

    topic: str
    dtype: str = ""
    mask: str = ""
    batch: Any = None
    heads: Any = None
    head_dim: Any = None
    length: Any = None

    @property
    def name(self) -> str:
        """The case in one line."""
        return " ".join(f"{name}={value}" for name, value in self.columns.items() if value not in ("", None))


def measure(case: PrecisionCase, context: Context) -> list[Row]:
    """The rows of a case: one for each sum, tensor or implementation."""
    if case.topic == SUMS:
        return sums()
    if case.topic == AUTOCAST:
        return autocast_dtypes(flags.DTYPES[case.dtype], context.options.device)
    return attention_errors(case, context)


def sums() -> list[Row]:
    """0.01 added a thousand times by each loop of `ACCUMULATIONS`, on the CPU."""
    rows = []
    for loop in ACCUMULATIONS:
        total = loop.total()
        dtypes = {"accumulator": _name(loop.accumulator), "addend": _name(loop.addend), "cast": loop.cast}
        rows.append({"name": loop.name, **dtypes, "total": total, "total_error": total - 10.0})
    return rows


def toy_model(inputs: int, outputs: int) -> nn.Module:
    """The model of the systems assignment of Stanford CS336: linear, ReLU, LayerNorm, linear."""
    first, last = nn.Linear(inputs, 10, bias=False), nn.Linear(10, outputs, bias=False)
    return nn.Sequential(OrderedDict(fc1=first, relu=nn.ReLU(), ln=nn.LayerNorm(10), fc2=last))


def autocast_dtypes(dtype: torch.dtype, device: torch.device) -> list[Row]:
    """The dtype of each tensor in a step of `toy_model` under autocast."""
    rows, inputs, outputs = 32, 16, 8
    model, x = toy_model(inputs, outputs).to(device), torch.randn(rows, inputs, device=device)
    targets = torch.randint(outputs, (rows,), device=device)
    found = tensor_dtypes(model, x, loss=lambda logits: F.cross_entropy(logits, targets), autocast=dtype)
    return [{"role": t.role, "name": t.name, "module": t.module, "tensor_dtype": _name(t.dtype)} for t in found]


def attention_errors(case: PrecisionCase, context: Context) -> list[Row]:
    """The errors of each implementation, and their budgets."""
    options = context.options
    shapes = Shapes.of(case.batch, q_len=case.length, d=case.head_dim, q_heads=case.heads or None)
    dtype, causal = flags.DTYPES[case.dtype], case.mask == "causal"
    generator = torch.Generator(options.device).manual_seed(options.seed)
    inputs = make_inputs(shapes, dtype=dtype, device=options.device, generator=generator)
    held_to = Inputs(*map(_off_mps, inputs))
    # Gradients of the output alone, since torch's function returns nothing else.
    plain = budget_of(held_to, causal=causal, return_lse=False)
    with_lse = budget_of(held_to, causal=causal)
    eps = TF32_EPS if options.tf32 else None

    def findings_of(name: str, budget: Budget, return_lse: bool) -> list[Finding]:
        results = evaluate(partial(attention, causal=causal, impl=name, return_lse=return_lse), inputs)
        return compare({result: _off_mps(x) for result, x in results.items()}, *budget, eps=eps)

    def errors(name: str) -> Row:
        findings = findings_of(name, plain, False)
        narrow = name in WITH_NARROW_SCORES and dtype.itemsize == 2
        if name not in WITHOUT_LSE and not narrow:
            findings += [finding for finding in findings_of(name, with_lse, True) if finding.name == "lse"]
        return error_columns(findings)

    comparison, rows = Comparison(context), []
    classify = partial(outcome_of, refusals=(ValueError, TypeError, NotImplementedError))
    for name in options.providers:
        found = comparison.attempt(name, "errors", partial(errors, name), classify)
        rows.append({"provider": name, **comparison.outcomes[name].columns, **(found or {})})
    return rows


def _off_mps(x: Tensor) -> Tensor:
    """MPS has no float64."""
    return x.cpu() if x.device.type == "mps" else x


def error_columns(findings: Sequence[Finding]) -> Row:
    """Errors and budgets by result and measure, and the largest share of a budget; None for what is not finite."""
    row: Row = {}
    for finding in findings:
        column = f"{finding.name}_{finding.measure}"
        row |= {column: _finite(finding.error), f"{column}_budget": _finite(finding.budget)}
        if finding.measure == "norm":
            row[f"{finding.name}_relative"] = _finite(finding.error / finding.size) if finding.size else None
    shares = [_finite(finding.error / finding.budget) for finding in findings]
    finite = [share for share in shares if share is not None]
    within = all(finding.holds for finding in findings)
    warning = "" if within else "an error exceeds its budget"
    of_budget = max(finite) if len(finite) == len(shares) else None
    return row | {"of_budget": of_budget, "within_budget": within, "warning": warning}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tables(frame: pd.DataFrame) -> str:
    """A table for each topic, and for attention two for each dtype and mask."""
    done = frame[frame["status"] == "ok"]
    topics = {topic: rows.dropna(axis="columns", how="all") for topic, rows in done.groupby("topic", sort=False)}
    parts = {}
    if SUMS in topics:
        rows = topics[SUMS].assign(total=topics[SUMS]["total"].map(str))
        columns = ["name", "accumulator", "addend", "cast", "total", "total_error"]
        parts["0.01 added 1000 times"] = markdown(rows[columns])
    if AUTOCAST in topics:
        keys = ["role", "name", "module"]
        rows = topics[AUTOCAST].pivot_table("tensor_dtype", keys, "dtype", aggfunc="first", sort=False).reset_index()
        parts["Dtypes of a small model under autocast"] = markdown(rows)
    if ATTENTION in topics:
        for (dtype, mask), rows in topics[ATTENTION].groupby(["dtype", "mask"], sort=False):
            title = f"Attention, {dtype}, {mask}"
            relative, largest = error_tables(rows)
            parts[f"{title}: norm of the error relative to the result's"] = relative
            parts[f"{title}: largest error / its budget"] = largest
    return sections(parts)


def error_tables(rows: pd.DataFrame) -> tuple[str, str]:
    """By implementation, head dimension and length: relative errors, and the largest errors next to their budgets."""
    rows = rows.astype({"head_dim": int, "length": int}).sort_values(["provider", "head_dim", "length"])
    rows = with_columns(rows, [f"{name}_{what}" for name in RESULTS for what in ("relative", *_LARGEST)])
    relative = rows[["provider", "head_dim", "length"]].copy()
    largest = relative.copy()
    for name in RESULTS:
        errors, budgets = (rows[f"{name}_{what}"].map(scientific) for what in _LARGEST)
        relative[name] = rows[f"{name}_relative"].map(scientific)
        largest[name] = (errors + " / " + budgets).mask(rows[f"{name}_largest"].isna(), ABSENT)
    return markdown(relative.join(rows[["of_budget", "within_budget"]])), markdown(largest)


def scientific(value: float | None) -> str:
    """An error with two digits and an exponent, since the errors of dtypes are powers of ten apart."""
    return ABSENT if value is None or pd.isna(value) else "0" if value == 0 else f"{value:.1e}"


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot the output's error over the length, a figure for each mask."""
    rows = frame[(frame["topic"] == ATTENTION) & (frame["status"] == "ok")]
    for mask, group in rows.groupby("mask", sort=False):
        group = group[group["out_relative"] > 0]
        group = group.assign(panel=group["dtype"] + ", d " + group["head_dim"].astype(int).astype(str))
        path, title = folder / f"error-{mask}.png", f"Relative error of the output against float64, {mask}"
        plot_lines(path, group, x="length", y="out_relative", line="provider", panel="panel", title=title)


def memory(case: PrecisionCase, options: argparse.Namespace) -> int | None:
    """The memory of the float64 reference."""
    if case.topic != ATTENTION:
        return None
    return int(_QUADRATIC_MATRICES * 8 * case.batch * max(1, case.heads) * case.length**2)


PROGRAM = harness.Program(
    name="precision",
    title="Precision",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("providers", "tf32", "seed"),
    notes=(
        "sums: on the CPU, in order, each term rounded to its dtype first",
        "attention: normal random numbers, seed {seed}",
        "the exact results are float64's for the same numbers in the dtype; gradients are those of the output alone",
        "a budget is twice naive's error in the same dtype, and the rounding of the result and of its terms",
    ),
    memory=memory,
    preload=COMPILER,
)


_USUAL = "--dtypes bf16 fp16 fp32 --batch 1 --heads 2 --no-tf32"
_ON_A_GPU = f"--masks causal full --lengths 512 2048 --head-dims 64 128 --providers {' '.join(IMPLEMENTATIONS)}"
# Without a GPU, compiling takes minutes.
_WITHOUT = "--masks causal --lengths 128 512 --head-dims 64 --providers flash sdpa tiled naive"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = flags.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    text = f"of {', '.join(TOPICS)} (default: all)"
    topics = flags.several(flags.one_of(*TOPICS))
    parser.add_argument("--topics", **topics, default=[*TOPICS], metavar="TOPIC", help=text)
    return parser


def precision_cases(options: argparse.Namespace) -> list[PrecisionCase]:
    """What the options name: sums, then autocast, then attention."""
    cases = {SUMS: [PrecisionCase(SUMS)]}
    cases[AUTOCAST] = [PrecisionCase(AUTOCAST, dtype) for dtype in ("float16", "bfloat16")]
    problems = itertools.product(options.dtypes, options.masks, options.head_dims, sorted(options.lengths))
    cases[ATTENTION] = [
        PrecisionCase(ATTENTION, dtype, mask, options.batch, options.heads, head_dim, length)
        for dtype, mask, head_dim, length in problems
    ]
    return [case for topic in TOPICS if topic in options.topics for case in cases[topic]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, providers=IMPLEMENTATIONS)
    return harness.run(PROGRAM, options, precision_cases(options))


if __name__ == "__main__":
    sys.exit(main())
