"""Host time of an eager attention call: how long Python and the launches keep the CPU, not the GPU.

    python benchmarks/host_overhead.py --lengths 256 --dtypes bf16

Makes many calls in a row without waiting for the device, and compares every implementation with torch's
`scaled_dot_product_attention`: the forward pass without and with its graph recorded, and the backward pass. On a CPU a
call computes before it returns, so there the figure is the whole time of a call.
"""

from __future__ import annotations

import functools
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

from benchmarks.lib import flags
from benchmarks.lib.harness import Case, Comparison, Context, Program, Row, run
from benchmarks.lib.intervals import figures_with_intervals
from benchmarks.lib.results import outcome_of
from benchmarks.lib.tables import markdown
from cs336_systems.attention import attention
from cs336_systems.profiling.timing import TimingMethod, host_milliseconds
from cs336_systems.profiling.torch_names import without_donated_buffers

REFERENCE = "torch"
PROVIDERS = [REFERENCE, "auto", "flash", "sdpa", "compiled", "naive", "tiled"]
PASSES = {"forward": "forward", "recorded": "with its graph", "backward": "backward"}
_WARMUP_CALLS = 3


@dataclass(frozen=True)
class HostCase(Case):
    """One pass of one attention call."""

    dtype: str
    mask: str
    batch: int
    heads: int
    length: int
    head_dim: int
    which: str


def make_call(provider: str, case: HostCase, tensors: Sequence[Tensor]) -> Callable[[], object]:
    """A function of which one call is one pass, warmed up; for the backward pass on a graph that is kept.

    Raises ValueError if the implementation cannot compute it.
    """
    causal = case.mask == "causal"
    attend: Callable[..., Tensor] = functools.partial(attention, causal=causal, impl=provider)
    if provider == REFERENCE:
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    call: Callable[[], object] = functools.partial(attend, *tensors)
    if case.which == "backward":
        output = attend(*tensors)
        call = functools.partial(torch.autograd.grad, output, tensors, torch.randn_like(output), retain_graph=True)
    for _ in range(_WARMUP_CALLS):
        call()
    return call


def measure(case: HostCase, context: Context) -> list[Row]:
    """A row for each provider, with microseconds per call."""
    options = context.options
    shape = (case.batch, case.heads, case.length, case.head_dim)
    draw = functools.partial(torch.randn, shape, device=options.device, dtype=flags.DTYPES[case.dtype])
    tensors = [draw(requires_grad=case.which != "forward") for _ in range(3)]
    comparison, times = Comparison(context), dict[str, Callable[[], float]]()
    refused = functools.partial(outcome_of, refusals=(ValueError,))
    # A compiled backward pass may otherwise overwrite its inputs, and cannot run again on the same graph.
    with without_donated_buffers():
        for name in options.providers:
            call = comparison.attempt(name, "first calls", functools.partial(make_call, name, case, tensors), refused)
            if call is not None:
                times[name] = functools.partial(host_milliseconds, call, options.calls, device=options.device)
    comparison.interleave(times, TimingMethod(options.rounds, pause_ms=5.0))
    return [
        {
            "provider": name,
            **_microseconds(comparison.columns(name)),
            **comparison.speedup_columns("over_torch", REFERENCE, name),
        }
        for name in options.providers
    ]


def _microseconds(row: Row) -> Row:
    names = ("median", "low", "high", "min", "max")
    return row | {f"{name}_us": row[f"{name}_ms"] and row[f"{name}_ms"] * 1e3 for name in names}


def tables(frame: pd.DataFrame) -> str:
    """Microseconds per call by provider and pass, and as a multiple of torch's, for each call."""
    frame, parts = frame.dropna(subset=["median_us"]), []
    for sizes, rows in frame.groupby(["dtype", "mask", "batch", "heads", "length", "head_dim"], sort=False):
        columns: dict[str, Any] = {}
        for which, title in PASSES.items():
            found = rows[rows["which"] == which].set_index("provider")
            columns[f"{title}, µs"] = found["median_us"]
            columns[f"{title}, of torch's"] = figures_with_intervals(found, "over_torch")
        table = pd.DataFrame(columns, rows["provider"].unique()).dropna(axis="columns", how="all")
        dtype, mask, *shape = sizes
        text = markdown(table.rename_axis("provider").reset_index())
        parts.append(f"## {dtype}, {mask}, q {tuple(shape)}\n\n{text}")
    return "\n\n".join(parts)


PROGRAM = Program(
    "host_overhead",
    "Host time of an eager call",
    measure,
    tables,
    notes=(
        "the median over {rounds} rounds of {calls} calls in a row, which do not wait for the GPU; on a CPU a call "
        "computes before it returns",
        "ratios are medians of those within a round",
    ),
    settings=("seed", "rounds", "calls", "providers"),
)


_USUAL = "--lengths 256 --head-dims 64 --dtypes bf16 --masks full --batch 1 --heads 8 --rounds 15"
_USUAL += " --providers torch auto flash sdpa compiled naive tiled"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.make_parser(__doc__, _USUAL)
    parser.add_argument("--calls", type=flags.positive, default=100, help="calls in a row (default: %(default)s)")
    options = flags.parse(parser, arguments)
    sizes = itertools.product(options.dtypes, options.masks, options.lengths, options.head_dims, PASSES)
    cases = [HostCase(dtype, mask, options.batch, options.heads, *rest) for dtype, mask, *rest in sizes]
    return run(PROGRAM, options, cases)


if __name__ == "__main__":
    sys.exit(main())
