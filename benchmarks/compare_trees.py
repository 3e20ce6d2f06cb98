"""Two or more checkouts of this library side by side: is a change faster?

    git worktree add ../before main
    python benchmarks/compare_trees.py ../before . --passes backward --dims 64 128 --lengths 1024 4096 16384
    python benchmarks/compare_trees.py . .:../triton-3.9       # or one checkout with two Tritons

After a colon stands a folder of packages that go before the installed ones, as `pip install --target` makes it. The
pass `decode` is attention of one query a head over a cache.

A process for each checkout computes the same calls, on the same inputs, in turns: for each cell every checkout is
measured once a round, in rotated order, so that a clock that falls under load falls for all. Results are held to the
error budget first, and all are compiled before anything is timed. The table has each one's rate, and in brackets how
many times as fast as the first it is, by the median of the ratios within rounds; differences of 1 % need --rounds 7.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.asked_device import asks_for_gpu
from benchmarks.flags import DTYPE_ALIASES, DTYPES, MASKS
from benchmarks.suite import positive
from cs336_systems.profiling.flops import PASSES, attention_flops, teraflops_per_second
from cs336_systems.profiling.report import format_number, markdown_table
from cs336_systems.profiling.sweep import Row, write_csv
from cs336_systems.profiling.timing import RoundTimes, TimingMethod, interleave

WORKER = Path(__file__).with_name("tree_worker.py")
DECODE = "decode"
COLUMNS = (
    "tree",
    "pass",
    "mask",
    "head_dim",
    "length",
    "batch",
    "heads",
    "groups",
    "median_ms",
    "tflops",
    "over_first",
    "round_ms",
)


class TreeError(RuntimeError):
    """A checkout cannot compute a call, or computes it wrong."""


class Cell(NamedTuple):
    """A call: its pass, mask, the shape of k and v, and how many heads of q each of their heads serves."""

    which: Any
    mask: str
    shape: tuple[int, int, int, int]
    groups: int = 1

    @property
    def flops(self) -> float:
        """Operations of one call."""
        batch, heads, length, head_dim = self.shape
        heads *= self.groups
        if self.which == DECODE:
            return attention_flops(batch, heads, 1, length, head_dim, causal=False, which="forward")
        causal = self.mask == "causal"
        return attention_flops(batch, heads, length, length, head_dim, causal=causal, which=self.which)

    def __str__(self) -> str:
        grouped = f", {self.groups} heads a group" if self.groups > 1 else ""
        if self.which == DECODE:
            return f"decode, d {self.shape[3]}, {self.shape[0]} × {self.shape[2]}{grouped}"
        return f"{self.which}, d {self.shape[3]}, {self.mask}, {self.shape[2]}{grouped}"


class Tree:
    """A process with one checkout's library."""

    def __init__(self, name: str, process: subprocess.Popen[str], settings: Row) -> None:
        self.name, self._process, self._settings = name, process, settings

    def ask(self, what: str, cell: Cell) -> None:
        """Begin a request, which `answer` ends."""
        call = {"pass": cell.which, "shape": cell.shape, "groups": cell.groups, "causal": cell.mask == "causal"}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what} | call | self._settings) + "\n")
        self._process.stdin.flush()

    def answer(self, cell: Cell) -> float:
        """What came of it. Raises TreeError where that is a failure."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {"failure": f"its process ended with {self._process.wait()}"}
        if "failure" in said:
            raise TreeError(f"{self.name}: {cell}: {said['failure']}")
        return float(said["value"] or 0.0)

    def time(self, cell: Cell) -> float:
        """Milliseconds of a call."""
        self.ask("time", cell)
        return self.answer(cell)


def folders_of(asked: str) -> list[Path]:
    """The checkout's folder, and those of its packages."""
    return [Path(part).resolve() for part in asked.split(os.pathsep)]


@contextmanager
def tree_of(asked: str, settings: Row) -> Iterator[Tree]:
    """The process of a checkout, which ends with the block."""
    environment = dict(os.environ)
    folder, *packages = folders_of(asked)
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, packages), str(folder), *([before] if before else [])])
    environment["PYTHONSAFEPATH"] = "1"  # nothing comes from the worker's own folder
    command = [sys.executable, str(WORKER)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    )
    try:
        yield Tree(asked, process, settings)
    finally:
        process.kill()
        process.communicate()


def all_at_once(trees: Sequence[Tree], what: str, cell: Cell) -> None:
    """One request to all checkouts at the same time, for what is not timed."""
    for tree in trees:
        tree.ask(what, cell)
    for tree in trees:
        tree.answer(cell)


def shape_of(options: argparse.Namespace, length: int, dim: int) -> tuple[int, int, int, int]:
    """That of k and v: all have as many tokens, and queries as many channels."""
    return max(1, options.tokens // length), max(1, options.channels // dim // options.groups), length, dim


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """What is measured, in this order."""
    return [
        Cell(which, mask, shape_of(options, length, dim), options.groups)
        for which, dim, mask, length in itertools.product(options.passes, options.dims, options.masks, options.lengths)
    ]


def rows_of(cell: Cell, times: dict[str, RoundTimes]) -> list[Row]:
    """A row for each checkout."""
    first = next(iter(times.values()))
    batch, heads, length, head_dim = cell.shape
    return [
        {
            "tree": name,
            "pass": cell.which,
            "mask": cell.mask,
            "head_dim": head_dim,
            "length": length,
            "batch": batch,
            "heads": heads,
            "groups": cell.groups,
            "median_ms": own.median,
            "tflops": teraflops_per_second(cell.flops, own.median),
            "over_first": statistics.median(a / b for a, b in zip(first.milliseconds, own.milliseconds, strict=True)),
            "round_ms": list(own.milliseconds),
        }
        for name, own in times.items()
    ]


def line_of(cell: Cell, rows: Sequence[Row]) -> list[str]:
    """The table's line of a cell."""
    return [str(cell), *(f"{format_number(row['tflops'])} ({row['over_first']:.3f})" for row in rows)]


def measure(options: argparse.Namespace) -> Iterator[tuple[Cell, list[Row]]]:
    """The rows of each cell, as they come. Raises TreeError."""
    method = TimingMethod(rounds=options.rounds)
    timing = {"warmup_ms": method.warmup_ms, "repetitions_ms": method.repetitions_ms, "pause_ms": 0.0, "rounds": 1}
    settings = {"device": options.device, "dtype": options.dtype, "impl": options.impl, "method": timing}
    cells = cells_of(options)
    with ExitStack() as stack:
        trees = [stack.enter_context(tree_of(asked, settings)) for asked in options.trees]
        for cell in cells:
            all_at_once(trees, "check", cell)
            all_at_once(trees, "prepare", cell)
        for cell in cells:
            all_at_once(trees, "prepare", cell)
            times = interleave({tree.name: partial(tree.time, cell) for tree in trees}, method=method)
            yield cell, rows_of(cell, times)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    add = parser.add_argument
    trees = "checkouts, each optionally with a folder of packages; the others are compared with the first"
    add("trees", nargs="+", metavar="TREE[:PACKAGES]", help=trees)
    passes = ["forward", "backward"]
    add("--passes", nargs="+", choices=[*PASSES, DECODE], default=passes, help="default: %(default)s")
    add("--dims", nargs="+", type=positive, default=[64, 128] if gpu else [32], metavar="D", help="%(default)s")
    add("--lengths", nargs="+", type=positive, default=[1024, 4096] if gpu else [128], metavar="N", help="%(default)s")
    add("--masks", nargs="+", choices=MASKS, default=["causal"], help="default: %(default)s")
    add("--tokens", type=positive, default=16384 if gpu else 256, help="batch × length (default: %(default)s)")
    add("--channels", type=positive, default=2048 if gpu else 64, help="heads of q × d (default: %(default)s)")
    add("--groups", type=positive, default=1, help="heads of q for each of k and v (default: %(default)s)")
    add("--dtype", default="bfloat16" if gpu else "float32", choices=[*DTYPES, *DTYPE_ALIASES], help="%(default)s")
    add("--impl", default="flash" if gpu else "tiled", help="of attention() (default: %(default)s)")
    add("--device", default="cuda" if gpu else "cpu", help="default: %(default)s")
    add("--rounds", type=positive, default=5, help="default: %(default)s")
    add("--output", type=Path, metavar="FILE", help="a CSV file for all rows")
    options = parser.parse_args(arguments)
    options.dtype = DTYPE_ALIASES.get(options.dtype, options.dtype)
    for asked in options.trees:
        tree, *packages = folders_of(asked)
        if not (tree / "cs336_systems" / "__init__.py").is_file():
            parser.error(f"TREE must be a checkout of this library, with a folder cs336_systems; got {tree}")
        for folder in packages:
            if not folder.is_dir():
                parser.error(f"PACKAGES must be a folder, as pip install --target makes it; got {folder}")
    if len(set(options.trees)) < len(options.trees):
        parser.error(f"each TREE must be named once; got {' '.join(options.trees)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 1 if a checkout fails."""
    options = parse(arguments)
    rows: list[Row] = []
    lines: list[list[str]] = []
    try:
        for cell, measured in measure(options):
            rows += measured
            lines.append(line_of(cell, measured))
            print(": ".join([lines[-1][0], "  ".join(lines[-1][1:])]), file=sys.stderr, flush=True)
            if options.output is not None:
                write_csv(options.output, rows, COLUMNS)
    except TreeError as error:
        print(f"compare_trees.py: error: {error}", file=sys.stderr)
        return 1
    print(markdown_table(["TFLOP/s", *options.trees], lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
