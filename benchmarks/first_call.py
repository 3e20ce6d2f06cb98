"""Time of the first attention call of a process, which compiles: forward, then backward.

    python benchmarks/first_call.py --providers flash flex --lengths 4096 --head-dims 128

Each process starts with torch and this project imported, and calls a provider once, forward and backward. The first
process finds empty caches of compiled code; the second finds what the first left. Imports that a provider does when it
is called count, as users wait for them too; those of torch's first backward, whatever it is of, do not. FlexAttention's
block mask is made before.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch

from benchmarks.lib import flags
from benchmarks.lib.attention_providers import PEER_DISTRIBUTIONS, Problem, add_peers, all_providers
from benchmarks.lib.harness import Context, Outcome, Program, Row, Status, run
from benchmarks.lib.isolation import run_isolated
from benchmarks.lib.results import error
from benchmarks.lib.tables import figures, markdown
from benchmarks.parts.attention_measure import Bound, outcome_of_provider, random_tensors
from cs336_systems.profiling.timing import synchronize

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables that name the folders of compiled code."""
STATES = ("empty", "filled")
PARTS = ("forward_s", "backward_s", "both_s")


@dataclass(frozen=True)
class FirstCall(Problem):
    """The first call of a provider."""

    provider: str


def measure(case: FirstCall, context: Context) -> list[Row]:
    """A row for each state of the caches, with medians over the rounds, and the extremes of both passes together."""
    found: dict[str, list[Row]] = {state: [] for state in STATES}
    for _ in range(context.options.rounds):
        with empty_caches():
            for state in STATES:
                finished = run_isolated(first_call, case, context.options, limit=context.options.timeout)
                row = error(finished.failure).columns if finished.failure else finished.result
                if "status" in row:
                    return [row]
                found[state].append(row)
    return [{"caches": state, **_summary(rows)} for state, rows in found.items()]


def first_call(case: FirstCall, options: argparse.Namespace) -> Row:
    """Seconds of both passes, in a process that has called nothing yet."""
    device: torch.device = options.device
    add_peers(options.peers)
    provider = {provider.name: provider for provider in all_providers(device)}[case.provider]
    refusal = provider.missing or provider.refusal(case, "both")
    if refusal:
        return Outcome(Status.UNSUPPORTED, refusal).columns
    bound = Bound(provider, case, random_tensors(case, device, options.seed), device)
    # torch imports sympy in the first backward of a process that is given a gradient, whatever it is of.
    torch.zeros(1, requires_grad=True).clone().backward(torch.zeros(1))
    synchronize(device)
    begin = time.perf_counter()
    try:
        with bound.ready("backward") as backward:
            synchronize(device)
            forward_s = time.perf_counter() - begin
            backward()
            synchronize(device)
    except Exception as exception:
        return outcome_of_provider(provider, exception).columns
    both_s = time.perf_counter() - begin
    return dict(zip(PARTS, (forward_s, both_s - forward_s, both_s), strict=True))


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Processes that start inside keep compiled code in a temporary folder, which is empty at first."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {name: str(Path(folder, name)) for name in CACHES}),
    ):
        yield


def _summary(rows: Sequence[Row]) -> Row:
    seconds = {name: [row[name] for row in rows] for name in PARTS}
    extremes = {"min_s": min(seconds["both_s"]), "max_s": max(seconds["both_s"])}
    return {**{name: statistics.median(values) for name, values in seconds.items()}, **extremes, "calls": len(rows)}


def tables(frame: pd.DataFrame) -> str:
    """Seconds by provider and state of the caches, for each problem."""
    parts = []
    for sizes, rows in frame.groupby(["dtype", "mask", "batch", "heads", "length", "head_dim"], sort=False):
        cells = {name.removesuffix("_s") + ", s": figures(rows, name) for name in PARTS if name in rows}
        between = {"both, least, s": rows.get("min_s"), "both, most, s": rows.get("max_s")}
        table = pd.DataFrame({"provider": rows["provider"], "caches": rows.get("caches"), **cells, **between})
        dtype, mask, *shape = sizes
        parts.append(f"## {dtype}, {mask}, q {tuple(shape)}\n\n{markdown(table)}")
    return "\n\n".join(parts)


PROGRAM = Program(
    "first_call",
    "The first call of a process",
    measure,
    tables,
    settings=("seed", "rounds"),
    notes=(
        "medians of {rounds} processes whose caches of compiled code were empty, and of as many that found what these "
        "had compiled",
        "a process has imported torch and this project, and called a backward of torch; what a provider imports when "
        "it is called counts",
    ),
    packages=PEER_DISTRIBUTIONS,
    isolated=False,
)
_USUAL = "--providers flash flex --lengths 4096 --head-dims 64 128 --dtypes bf16 --masks causal --batch 4 --heads 16"
_USUAL += " --rounds 3 --peers"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = flags.make_parser(__doc__, _USUAL)
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, providers=[provider.name for provider in all_providers(torch.device("cpu"))])
    sizes = itertools.product(options.dtypes, options.masks, options.lengths, options.head_dims, options.providers)
    cases = [
        FirstCall(dtype, mask, options.batch, options.heads, max(1, options.heads), head_dim, length, provider)
        for dtype, mask, length, head_dim, provider in sizes
    ]
    return run(PROGRAM, options, cases)


if __name__ == "__main__":
    sys.exit(main())
