"""Time and memory of what attention computes besides causality: masks, score changes, sinks, dropout.

    python benchmarks/features.py                                    # every feature; short without a GPU
    python benchmarks/features.py --peers PEERS                      # with FlashAttention-4 from that folder
    python benchmarks/features.py --features window_4096 document --head-dims 128 --lengths 32768

The first of --providers is compared with the others, and with its own plain causal attention at the same sizes; all are
measured in turns. --jobs processes compile beforehand, for the caches on disk. docs/benchmarking.md has the features.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# A case compiles a few kernels: a pool of compiling processes would take longer to start.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# FlashAttention-4 compiles again in every process unless it keeps what it compiled.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")

import pandas as pd
import torch
from torch import Tensor

from benchmarks.lib import flags, harness
from benchmarks.lib.attention_providers import PEER_DISTRIBUTIONS, add_peers, reasons_missing
from benchmarks.lib.comparison import plausible_difference, relative_difference, timing_method
from benchmarks.lib.harness import Case, Comparison, Context, Row
from benchmarks.lib.intervals import figures_with_intervals
from benchmarks.lib.isolation import map_isolated
from benchmarks.lib.tables import markdown, number
from benchmarks.parts.feature_cases import FEATURES, Feature, Sizes
from benchmarks.parts.feature_providers import OURS, PEERS, bind
from cs336_systems.profiling.report import ABSENT
from cs336_systems.profiling.timing import call_milliseconds, measure_ms, synchronize
from cs336_systems.profiling.torch_names import COMPILER, without_donated_buffers

PLAIN = "plain"
"""The first provider's causal attention, in the rows of other features."""
_USUAL_LENGTHS = {"window_4096": [16384, 65536]}


@dataclass(frozen=True)
class FeatureCase(Case):
    """A feature, its sizes and a pass."""

    feature: str
    which: str
    dtype: str
    batch: int
    heads: int
    length: int
    head_dim: int


@dataclass(frozen=True)
class Pass:
    """One pass of one provider, a forward without a graph or a backward on a graph that is kept; how it did at first.

    ``results`` are the output, or the gradients of q, k and v, as (tokens, heads, d).
    """

    call: Callable[[], tuple[Tensor, ...]]
    results: tuple[Tensor, ...]
    columns: Row


def first_call(provider: str, feature: Feature, sizes: Sizes, which: str, tensors: Sequence[Tensor]) -> Pass:
    """Compile a pass, and measure single calls and their memory; ``tensors`` are q, k, v and the output's gradient."""
    begin, device = time.perf_counter(), sizes.device
    attend, layout = bind(provider, feature, sizes)
    *inputs, gradient = map(layout.arrange, tensors)
    inputs = [x.detach().requires_grad_() for x in inputs]
    call: Callable[[], tuple[Tensor, ...]] = torch.no_grad()(lambda: (attend(*inputs),))
    if which == "backward":
        output, wanted = attend(*inputs), (*inputs, *feature.leaves)
        call = functools.partial(torch.autograd.grad, output, wanted, gradient, retain_graph=True)
    results = tuple(map(layout.restore, call()[:3]))
    synchronize(device)
    columns: Row = {"first_call_s": round(time.perf_counter() - begin, 2), "peak_mib": None}
    columns["probe_ms"] = call_milliseconds(call, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        columns["peak_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return Pass(call, results, columns)


def measure(case: FeatureCase, context: Context) -> list[Row]:
    """A row for each provider, and for plain causal attention."""
    options, comparison, method = context.options, Comparison(context), timing_method(context.options)
    add_peers(options.peers)
    sizes = Sizes(case.batch, case.heads, case.length, case.head_dim, flags.DTYPES[case.dtype], options.device)
    tensors = [sizes.random(case.batch, case.heads, case.length, case.head_dim, dtype=sizes.dtype) for _ in range(4)]
    feature, ours = FEATURES[case.feature](sizes), options.providers[0]
    shared: Row = {"visible": feature.visible(sizes), "tf32": options.tf32}
    calls, first, expected = dict[str, Callable[[], float]](), dict[str, Row](), None
    names = [*options.providers, *([] if case.feature == "causal" else [PLAIN])]
    # A compiled backward pass may otherwise overwrite its inputs, and cannot run again on the same graph.
    with without_donated_buffers():
        for name in names:
            what = (ours, FEATURES["causal"](sizes)) if name == PLAIN else (name, feature)
            prepare = functools.partial(first_call, *what, sizes, case.which, tensors)
            made = comparison.attempt(name, "first call", prepare)
            first[name] = dict.fromkeys(("first_call_s", "probe_ms", "peak_mib", "difference")) | {"warning": ""}
            if made is None:
                continue
            first[name] |= made.columns
            if name == ours:
                expected = made.results
            elif name != PLAIN and expected is not None and not feature.random:
                first[name] |= compared(relative_difference(made.results, expected), case, options)
            if not comparison.skip_if_slow(name, made.columns["probe_ms"], options.max_seconds):
                calls[name] = functools.partial(measure_ms, made.call, device=sizes.device, method=method)
        comparison.interleave(calls, method)
    rows = []
    for name in names:
        ratios = comparison.speedup_columns("speedup_of_first", ours, name)
        ratios |= comparison.speedup_columns("of_plain", PLAIN if PLAIN in names else ours, name)
        rows.append({"provider": name, **comparison.columns(name), **ratios, **first[name], **shared})
    return rows


def compared(difference: float, case: FeatureCase, options: argparse.Namespace) -> Row:
    """The columns of a difference from the first provider's results, relative to their norm."""
    allowed = plausible_difference(case.dtype, gradients=case.which == "backward", tf32=options.tf32)
    text = f"results differ from {options.providers[0]}'s by {difference:.2g} of their norm"
    # JSON has no infinity.
    return {"difference": min(difference, 1e9), "warning": "" if difference <= allowed else text}


def drive(sweep: harness.Sweep[FeatureCase], cases: Sequence[FeatureCase]) -> None:
    """Compile in parallel processes, for the caches on disk, then measure one case after the other."""
    stored = set(sweep.frame.get("case", ()))
    quick = argparse.Namespace(**vars(sweep.options) | {"rounds": 1, "warmup": 0.0, "rep": 0.0})
    jobs = [(case, Context(quick)) for case in cases if case.name not in stored] if sweep.options.jobs else []
    calls = map_isolated(measure, jobs, processes=max(1, sweep.options.jobs), limit=sweep.options.timeout)
    for count, ((case, _), finished) in enumerate(calls, 1):
        sweep.note(f"compiled {count}/{len(jobs)}: {case.name} {finished.failure}")
    for case in cases:
        sweep.rows(case)


def tables(frame: pd.DataFrame) -> str:
    """A line for each case: times, the fastest peer, and the time as a multiple of causal attention's."""
    if "provider" not in frame:
        return ""  # no case could be measured at all
    names = [name for name in frame["provider"].dropna().unique() if name != PLAIN]
    sizes, lines = ["feature", "which", "dtype", "head_dim", "batch", "length"], []
    for key, rows in frame.dropna(subset=["provider"]).groupby(sizes, sort=False):
        rows = rows.set_index("provider")
        first, medians = rows.loc[names[0]], rows["median_ms"].astype(float).dropna()
        peers = medians.drop([names[0], PLAIN], errors="ignore")
        best = peers.idxmin() if len(peers) and names[0] in medians else None
        lines.append(
            dict(zip(sizes, key, strict=True))
            | {"visible, %": f"{100 * first['visible']:.3g}"}
            | {f"{name}, ms": number(medians.get(name)) for name in names}
            | {
                "over the best peer, ×": figures_with_intervals(rows, "speedup_of_first").get(best, ABSENT),
                "best peer": number(best),
            }
            | {
                "of plain causal, ×": figures_with_intervals(rows, "of_plain")[names[0]],
                "peak, MiB": number(first["peak_mib"]),
            }
        )
    return markdown(pd.DataFrame(lines))


PROGRAM = harness.Program(
    "features",
    "Features of attention",
    measure,
    tables,
    settings=("providers", "rounds", "warmup", "rep", "max_seconds", "seed", "tf32"),
    packages=PEER_DISTRIBUTIONS,
)


_USUAL = (
    "--passes forward backward --tokens 16384 --rounds 7 --most-rounds --warmup 5 --max-seconds 0.5 --no-tf32 --peers"
)
_ON_A_GPU = (
    f"--providers flash {' '.join(PEERS)} --dtypes bf16 --lengths --head-dims 64 128 --batch --heads 16 --rep 15"
)
_WITHOUT = "--providers tiled torch --dtypes fp32 --lengths 512 --head-dims 64 --batch 1 --heads 2 --rep 30 --jobs 0"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    gpu = flags.wants_gpu(arguments)
    jobs = f"--jobs {min(12, os.cpu_count() or 1)}"
    usual = f"{_USUAL} --features {' '.join(FEATURES)} {f'{_ON_A_GPU} {jobs}' if gpu else _WITHOUT}"
    parser = flags.make_parser(__doc__, usual)
    parser.epilog = f"providers: {', '.join(OURS)}; {', '.join(PEERS)}"
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, features=[*FEATURES], passes=flags.PASSES[:2], providers=[*OURS, *PEERS])
    if options.providers[0] not in OURS:
        parser.error(f"--providers must begin with one of {', '.join(OURS)}; got {options.providers[0]}")
    return options


def cases_of(options: argparse.Namespace) -> list[FeatureCase]:
    """The cases; --tokens gives each length at least one sequence."""
    return [
        FeatureCase(feature, which, dtype, options.batch or max(1, options.tokens // n), options.heads, n, head_dim)
        for dtype, feature in itertools.product(options.dtypes, options.features)
        for n in options.lengths or _USUAL_LENGTHS.get(feature, [8192])
        for head_dim, which in itertools.product(options.head_dims, options.passes)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.redraw is None:
        try:
            reasons = reasons_missing(options)
        except ValueError as error:
            print(f"features.py: error: {error}", file=sys.stderr)
            return 2
        options.missing = {name: reasons[name] for name in options.providers if name in PEERS and reasons.get(name)}
        options.providers = [name for name in options.providers if name not in options.missing]
    program = dataclasses.replace(PROGRAM, preload=COMPILER if "flex" in options.providers else ())
    return harness.run(program, options, cases_of(options), drive)


if __name__ == "__main__":
    sys.exit(main())
