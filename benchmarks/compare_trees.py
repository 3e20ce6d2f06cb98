"""Two or more checkouts of this library compared: is a change faster?

    git worktree add ../before main
    python benchmarks/compare_trees.py ../before . --passes backward --head-dims 64 128 --lengths 1024 4096 16384
    python benchmarks/compare_trees.py . .:../triton-3.9       # one checkout with two versions of Triton

After a colon comes a folder of packages that precede the installed ones, as `pip install --target` makes it. With
--decode, a call is one query per head over a full cache (`attention_with_cache`); with --step, a training step of a
small Transformer.

One process per checkout computes the same calls on the same inputs, in turns: each checkout is measured once a round,
in rotated order, so that clocks that fall under load fall for all. Results are compared with float64 first. The table
has the rate of each, and in brackets how many times as fast as the first checkout it is: the median of the ratios
within rounds. Differences of 1 % need --rounds 7.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd

from benchmarks.lib import flags
from benchmarks.lib.harness import Case, Comparison, Context, Program, Row, Status, Sweep, run, timing_method
from benchmarks.lib.tables import matrix, number
from benchmarks.parts.tree_worker import model_sizes
from cs336_systems.profiling.flops import Pass, attention_flops, teraflops_per_second
from cs336_systems.transformer import TransformerConfig

WORKER = Path(__file__).parent / "parts" / "tree_worker.py"
DECODE, STEP = "decode", "step"


class TreeError(RuntimeError):
    """A checkout cannot compute a call, or computes it wrong."""


@dataclass(frozen=True)
class TreeCase(Case):
    """An attention call, ``which`` is its pass; or `decode`, or the training `step` of a model (`model_sizes`)."""

    provider: str
    which: str
    dtype: str
    mask: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int

    @property
    def flops(self) -> float:
        """Operations of one call."""
        if self.which == STEP:
            return self.batch * self.length * TransformerConfig(**model_sizes(self.columns)).training_flops_per_token()
        queries = 1 if self.which == DECODE else self.length
        which = cast(Pass, "forward" if self.which == DECODE else self.which)
        causal = self.mask == "causal" and self.which != DECODE
        return attention_flops(self.batch, self.heads, queries, self.length, self.head_dim, causal=causal, which=which)


class Tree:
    """A checkout and the process that computes with it, which is started again after it ended."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: Any = None

    def ask(self, what: str, case: TreeCase, options: argparse.Namespace) -> float:
        """Send a request and wait for its answer: milliseconds for `time`, otherwise 0. Raises TreeError."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        request = {"do": what, "case": case.columns, "device": str(options.device)}
        timer = threading.Timer(options.timeout, self._process.kill)
        timer.start()
        try:
            print(json.dumps(request | {"warmup": options.warmup, "rep": options.rep}), file=self._process.stdin)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        reply = json.loads(line) if line else {"failure": f"its process ended with {self._process.wait()}"}
        if "failure" in reply:
            raise TreeError(f"{self.name}: {what}: {reply['failure']}")
        return float(reply["value"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()  # closes the pipes

    def _start(self) -> None:
        self.close()
        folder, *packages = folders_of(self.name)
        path = os.pathsep.join(filter(None, [*map(str, packages), str(folder), os.environ.get("PYTHONPATH")]))
        # PYTHONSAFEPATH: nothing is imported from the worker's own folder.
        environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._process = subprocess.Popen([sys.executable, str(WORKER)], env=environment, cwd=folder, **pipes)


tree_of = functools.cache(Tree)
"""The checkout of a name; one for the whole program."""


def folders_of(tree: str) -> list[Path]:
    """The folder of a checkout, and those of its packages."""
    return [Path(folder).resolve() for folder in tree.split(os.pathsep)]


def measure(case: TreeCase, context: Context) -> list[Row]:
    """A row for each checkout."""
    options = context.options
    comparison, first = Comparison(context), options.trees[0]

    def ask(name: str, what: str) -> Callable[[], float]:
        return functools.partial(tree_of(name).ask, what, case, options)

    with ThreadPoolExecutor(len(options.trees)) as threads:  # they compile at the same time
        list(threads.map(lambda name: comparison.attempt(name, "prepare", ask(name, "prepare")), options.trees))
    calls = {name: ask(name, "time") for name in options.trees}
    comparison.interleave(calls, timing_method(options))
    rows = []
    for name in options.trees:
        columns = comparison.columns(name)
        tflops = columns["median_ms"] and teraflops_per_second(case.flops, columns["median_ms"])
        over_first = comparison.speedup_columns("over_first", name, first)
        rows.append({"tree": name, **columns, "tflops": tflops, **over_first})
    return rows


def tables(frame: pd.DataFrame) -> str:
    """TFLOP/s of each checkout, and its speed-up over the first one, for each case."""
    titles = frame[["provider", "which", "dtype", "mask"]].agg(" ".join, axis="columns")
    titles += " d " + frame["head_dim"].astype(str) + " length " + frame["length"].astype(str)
    pairs = zip(*(frame[name] for name in ("tflops", "over_first", "over_first_low", "over_first_high")), strict=True)
    cells = [
        None if pd.isna(rate) else f"{number(rate)} ({ratio:.3f}, {low:.3f} to {high:.3f})"
        for rate, ratio, low, high in pairs
    ]
    name = "TFLOP/s (over the first)"
    return matrix(frame.assign(**{name: titles, "cell": cells}), [name], "tree", "cell")


PROGRAM = Program(
    "compare_trees",
    "Checkouts compared",
    measure,
    tables,
    settings=("trees", "rounds", "warmup", "rep"),
    isolated=False,
)


_USUAL = "--masks causal --passes forward backward --rounds 5 --warmup 5 --rep 15"
_ON_A_GPU = "--lengths 1024 4096 --head-dims 64 128 --dtypes bf16 --providers flash --tokens 16384 --channels 2048"
_WITHOUT = "--lengths 128 --head-dims 32 --dtypes fp32 --providers tiled --tokens 256 --channels 64"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Ends the program for trees that cannot be compared."""
    parser = flags.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    parser.add_argument("trees", nargs="*", metavar="TREE[:PACKAGES]", help="checkouts; the first is the baseline")
    parser.add_argument("--groups", type=flags.positive, default=1, help="query heads per key head (%(default)s)")
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--decode", action="store_true", help="attention over a cache, in place of --passes")
    others.add_argument("--step", action="store_true", help="a training step, in place of --passes")
    options = flags.parse(parser, arguments)
    if not options.trees and options.redraw is None:
        parser.error("TREE must name at least one checkout")
    for name in options.trees:
        tree, *packages = folders_of(name)
        if not (tree / "cs336_systems" / "__init__.py").is_file():
            parser.error(f"TREE must be a checkout of this library, with a folder cs336_systems; got {tree}")
        for folder in packages:
            if not folder.is_dir():
                parser.error(f"PACKAGES must be a folder, as pip install --target makes it; got {folder}")
    if len(set(options.trees)) < len(options.trees):
        parser.error(f"each TREE must be named once; got {' '.join(options.trees)}")
    return options


def cases_of(options: argparse.Namespace) -> list[TreeCase]:
    """The cases: each has --tokens tokens in a batch, and --channels channels in a query, or the least possible."""
    passes = [DECODE] if options.decode else [STEP] if options.step else options.passes
    axes = (options.providers, passes, options.dtypes, options.head_dims, options.masks, options.lengths)
    cases = []
    for provider, which, dtype, dim, mask, length in itertools.product(*axes):
        kv_heads = max(1, options.channels // dim // options.groups)
        batch = max(1, options.tokens // length)
        cases.append(TreeCase(provider, which, dtype, mask, batch, kv_heads * options.groups, kv_heads, dim, length))
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; the exit status is 0, 1 if a checkout failed, 2 for invalid input, 130 when interrupted."""
    options = parse(arguments)
    failed: list[Row] = []

    def drive(sweep: Sweep[TreeCase], cases: list[TreeCase]) -> None:
        for case in cases:
            failed.extend(row for row in sweep.rows(case) if row["status"] != Status.OK.value)
        print(tables(sweep.frame))

    try:
        status = run(PROGRAM, options, cases_of(options), drive)
    finally:
        for name in options.trees:
            tree_of(name).close()
    return status or bool(failed)


if __name__ == "__main__":
    sys.exit(main())
