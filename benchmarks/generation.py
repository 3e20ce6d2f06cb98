"""Generation: the time of a token beside the bytes that a step must read, and attention over a cache alone.

    python benchmarks/generation.py                                  # steps of a model; a short run without a GPU
    python benchmarks/generation.py --preset large --batch 1 32 --context 2048 --modes eager graph graph+compile
    python benchmarks/generation.py --attention                      # attention_with_cache beside torch's function

A step of one token has to read all weights once, and the keys and values of every sequence: its bytes by its time are
shown in GB/s, and as a share of the rate of a copy measured in the same run. Each cell is written when it is measured,
and --resume goes on where a run stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.asked_device import asks_for_gpu
from benchmarks.comparison import DeviceLostError
from benchmarks.feature_cells import Measurement
from benchmarks.flags import DTYPE_ALIASES, DTYPES
from benchmarks.generation_cells import (
    BACKENDS,
    MODES,
    OURS,
    TORCH,
    Conditions,
    Shape,
    cache_bytes,
    copy_rate,
    measure_attention,
    measure_steps,
    weight_bytes,
)
from benchmarks.isolation import termination_as_interruption
from benchmarks.suite import opened
from cs336_systems.profiling.environment import Environment, collect_environment
from cs336_systems.profiling.memory import release_memory
from cs336_systems.profiling.report import ABSENT, environment_lines, format_number, markdown_table
from cs336_systems.profiling.sweep import (
    ConfigurationMismatchError,
    Row,
    RowStore,
    Status,
    write_csv,
)
from cs336_systems.profiling.timing import TimingMethod
from cs336_systems.transformer import PRESETS, Transformer, preset

SHAPES = (
    Shape(1, 131_072, 32, 8),
    Shape(8, 16_384, 32, 8),
    Shape(64, 4096, 32, 8),
    Shape(16, 8192, 32, 32),
    Shape(128, 1024, 32, 8),
    Shape(1, 4096, 32, 8),
)
SMALL_SHAPES = (Shape(1, 512, 4, 2, 64), Shape(4, 128, 4, 4, 64))
"""Without a GPU."""

COLUMNS = (
    *("what", "model", "dtype", "batch", "context", "q_heads", "kv_heads", "head_dim", "contender", "status", "reason"),
    *("median_ms", "min_ms", "max_ms", "rounds", "tokens_per_s", "weight_bytes", "cache_bytes", "gb_per_s"),
    *("copy_gb_per_s", "of_copy", "ready_s", "difference"),
)


def row_of(name: str, measured: Measurement, copy: float, weights: float, cache: float, facts: dict[str, Any]) -> Row:
    """A contender's row; ``facts`` are its cell's, and the bytes what it has to read: without weights, attention."""
    times = measured.times
    rate = None if times is None else (weights + cache) / times.median / 1e6
    return {
        **facts,
        "contender": name,
        "status": measured.outcome.status.value,
        "reason": measured.outcome.reason,
        "median_ms": times and times.median,
        "min_ms": times and times.minimum,
        "max_ms": times and times.maximum,
        "rounds": times and len(times.milliseconds),
        "tokens_per_s": facts["batch"] / times.median * 1e3 if times and weights else None,
        "weight_bytes": int(weights),
        "cache_bytes": int(cache),
        "gb_per_s": rate,
        "copy_gb_per_s": copy,
        "of_copy": None if rate is None else rate / copy,
        "ready_s": None if measured.ready_s is None else round(measured.ready_s, 2),
        "difference": measured.difference,
    }


class Run:
    """Measures cell by cell, and stores each cell's rows when it is measured."""

    def __init__(self, options: argparse.Namespace, store: RowStore, environment: Environment) -> None:
        self._options, self._store = options, store
        self._environment = environment_lines(environment)
        self._conditions = Conditions(options.device, options.dtype, TimingMethod(rounds=options.rounds))
        self._copy = copy_rate(self._conditions)
        self._dtype = str(options.dtype).removeprefix("torch.")
        print(f"a copy in memory, read plus written: {format_number(self._copy)} GB/s", flush=True)

    def measure(self) -> None:
        """All cells that are not stored yet."""
        if self._options.attention:
            self._attention()
        else:
            self._steps()
        self.write()

    def _steps(self) -> None:
        options = self._options
        room = (options.rounds + 1) * options.new_tokens
        changes = {} if options.layers is None else {"num_layers": options.layers}
        config = preset(options.preset, context_length=options.context + room, **changes)
        name = options.preset + ("" if options.layers is None else f" of {options.layers} layers")
        batches = [batch for batch in options.batch if not self._store.is_finished(f"{name} batch {batch}")]
        if not batches:
            return
        torch.manual_seed(0)
        model = Transformer(config, device=options.device, dtype=options.dtype)
        # Half-way through the rounds that are timed.
        tokens = options.context + options.new_tokens + options.rounds * options.new_tokens / 2
        for batch in batches:
            measured = measure_steps(model, batch, options.context, options.new_tokens, options.modes, self._conditions)
            facts = {"what": "step", "model": name, "dtype": self._dtype, "batch": batch, "context": options.context}
            facts |= {"q_heads": config.num_heads, "kv_heads": config.num_kv_heads or config.num_heads}
            read = weight_bytes(model), cache_bytes(config, batch, tokens, options.dtype)
            self._keep(f"{name} batch {batch}", measured, *read, facts | {"head_dim": config.d_head})

    def _attention(self) -> None:
        options = self._options
        on_gpu = options.device.type == "cuda"
        contenders = [TORCH, OURS, *(BACKENDS if on_gpu else ())]
        for shape in SHAPES if on_gpu else SMALL_SHAPES:
            key = f"attention {tuple(shape)}"
            if self._store.is_finished(key):
                continue
            measured = measure_attention(shape, contenders, self._conditions)
            facts = {"what": "attention", "model": None, "dtype": self._dtype} | shape._asdict()
            facts["context"] = facts.pop("cache")
            self._keep(key, measured, 0, shape.read_bytes(options.dtype), facts)

    def _keep(
        self, key: str, measured: dict[str, Measurement], weights: float, cache: float, facts: dict[str, Any]
    ) -> None:
        rows = [row_of(name, one, self._copy, weights, cache, facts) for name, one in measured.items()]
        self._store.append(key, rows)
        self.write()
        parts = [f"{row['contender']} {format_number(row['median_ms'])} ms {row['reason'][:120]}" for row in rows]
        print(f"{key}: {'; '.join(part.strip() for part in parts)}", flush=True)
        release_memory(self._options.device)

    def write(self) -> None:
        """The files for people, from all rows that there are."""
        write_csv(self._store.folder / "results.csv", self._store.rows, COLUMNS)
        (self._store.folder / "tables.md").write_text(report(self._store.rows, self._environment))


HEADERS = (
    *("what", "dtype", "batch", "context", "heads", "contender", "ms", "tokens/s"),
    *("weights, GB", "keys and values, GB", "GB/s", "of a copy, %", "ready after, s"),
)


def report(rows: Iterable[Row], environment: Sequence[str]) -> str:
    """The table, and why what has no figure has none."""
    rows = [*rows]
    lines = []
    for row in (row for row in rows if row["status"] == Status.OK.value):
        share = format_number(100 * row["of_copy"])
        lines.append(
            [
                row["model"] or row["what"],
                *(row["dtype"], str(row["batch"]), str(row["context"])),
                f"{row['q_heads']}/{row['kv_heads']} × {row['head_dim']}",
                *(row["contender"], format_number(row["median_ms"]), format_number(row["tokens_per_s"])),
                format_number(row["weight_bytes"] / 1e9) if row["weight_bytes"] else ABSENT,
                *(format_number(row["cache_bytes"] / 1e9), format_number(row["gb_per_s"]), share),
                format_number(row["ready_s"]),
            ]
        )
    parts = ["# Generation", "", *environment, "", markdown_table(HEADERS, lines), ""]
    missing = [row for row in rows if row["status"] != Status.OK.value]
    if missing:
        of = [
            f"- {row['model'] or row['what']}, batch {row['batch']}, context {row['context']}, {row['contender']}: "
            f"{row['status']}: {row['reason']}"
            for row in missing
        ]
        parts += ["## Without a figure", "", *of, ""]
    return "\n".join(parts)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = asks_for_gpu(arguments)
    names = sorted({name for suite in PRESETS.values() for name in suite})
    add = parser.add_argument
    add("--attention", action="store_true", help="attention over a cache alone, of a table of shapes")
    add("--preset", choices=names, default="large" if gpu else "small", help="the model (default: %(default)s)")
    add("--layers", type=int, help="so many layers instead of the preset's, for a quick look")
    add("--batch", nargs="+", type=int, default=[1, 32] if gpu else [1], help="default: %(default)s")
    add("--context", type=int, default=2048 if gpu else 64, help="tokens before the first new one (%(default)s)")
    add("--new-tokens", type=int, default=32 if gpu else 4, help="steps of a round (default: %(default)s)")
    modes = ["eager", "graph", "graph+compile"] if gpu else ["eager"]
    add("--modes", nargs="+", choices=MODES, default=modes, help="how steps are run (default: %(default)s)")
    add("--dtype", default="bfloat16" if gpu else "float32", choices=[*DTYPES, *DTYPE_ALIASES])
    add("--device", type=torch.device, default=torch.device("cuda" if gpu else "cpu"))
    add("--rounds", type=int, default=5 if gpu else 3, help="rounds for the median (default: %(default)s)")
    add("--output", type=Path, default=Path("results/generation"), help="default: %(default)s")
    add("--resume", action="store_true", help="measure what the output folder does not have yet")
    add("--commit", help="the commit to record where the checkout is not in a git repository")
    options = parser.parse_args(arguments)
    options.dtype = DTYPES[DTYPE_ALIASES.get(options.dtype, options.dtype)]
    for name in ("context", "new_tokens", "rounds", *(["layers"] if options.layers is not None else [])):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    return options


def configuration_of(options: argparse.Namespace, environment: Environment) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    asked = {name: getattr(options, name) for name in ("context", "new_tokens", "modes", "rounds")}
    machine = {"device": environment.device, "torch": environment.torch, "triton": environment.triton}
    return asked | machine | {"dtype": str(options.dtype)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 for what cannot be done, 3 for a lost device, 130 when interrupted."""
    options = parse(arguments)
    if options.device.index is not None:
        torch.cuda.set_device(options.device)
    environment = collect_environment(options.device, commit=options.commit)
    try:
        store = opened(options, configuration_of(options, environment))
    except ConfigurationMismatchError as error:
        print(f"generation.py: error: {error}", file=sys.stderr)
        return 2
    environment.write(options.output / "environment.json")
    try:
        with termination_as_interruption():
            Run(options, store, environment).measure()
    except KeyboardInterrupt:
        print("interrupted; --resume goes on", flush=True)
        return 130
    except DeviceLostError as error:
        print(f"{error}; --resume tries the cell again", flush=True)
        return 3
    print(f"wrote {options.output / 'tables.md'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
