"""The main benchmark: attention over lengths and head dimensions, for every implementation, in time and in memory.

    python benchmarks/attention.py                             # `quick` on a GPU, `cpu` without one
    python benchmarks/attention.py --preset paper --providers flash torch --out results/paper
    python benchmarks/attention.py --lengths 1024 4096 --head-dims 64 --dtypes bf16 fp32 --batch 4 --heads 16
    python benchmarks/attention.py --preset course --dry-run
    python benchmarks/attention.py --preset course --out results/course --resume

For each length, head dimension, dtype and mask it measures the forward pass, the backward pass and both, the memory
held for the backward pass and the peak, for this library's implementations, torch's backends, and other libraries if
they are installed. All are measured in turns and compared with `naive`. docs/benchmarking.md says how, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib import flags, harness
from benchmarks.lib.attention_providers import (
    PEER_DISTRIBUTIONS,
    Problem,
    all_providers,
    chosen_providers,
    reasons_missing,
)
from benchmarks.lib.tables import number
from benchmarks.parts.attention_measure import measure
from benchmarks.parts.attention_report import METRICS, benchmark, plots, run_perf_report, tables
from cs336_systems.profiling.torch_names import COMPILER

_TOKENS = "--tokens 16384 --channels 2048 --dtypes bf16"
_COURSE = "--heads 0 --head-dims 16 32 64 128 --dtypes fp32 bf16"
PRESETS = {
    "cpu": "--lengths 128 256 512 1024 --head-dims 32 64 --dtypes fp32 --masks causal --batch 1 --heads 4",
    "quick": f"--lengths 512 1024 2048 4096 8192 --head-dims 64 128 --masks causal {_TOKENS}",
    "paper": "--lengths 512 1024 2048 4096 8192 16384 --head-dims 64 128 256 --masks causal full "
    f"--passes forward backward {_TOKENS}",
    "course": f"--lengths 256 1024 4096 8192 16384 --masks full --batch 8 {_COURSE}",
    "course-causal": "--lengths 128 256 512 1024 2048 4096 8192 16384 32768 65536 --masks causal --batch 1 " + _COURSE,
}
"""Flags by the name of a sweep: `cpu` and `quick` are the defaults without and with a GPU, `paper` is the sweep of the
FlashAttention papers, and the others are those of Stanford's CS336."""
_USUAL = "--preset --lengths --head-dims --dtypes --masks --passes --batch --tokens --heads --channels --kv-heads"
_USUAL += " --v-head-dim --rep --peers --providers all --rounds 7 --most-rounds --warmup 5 --max-seconds 1 --no-tf32"


def make_parser() -> argparse.ArgumentParser:
    """The command line. What is not given comes from the preset."""
    parser = flags.make_parser(__doc__, _USUAL, timeout=1800)
    presets = [f"  {name}: {text}" for name, text in PRESETS.items()]
    members: dict[str, list[str]] = {}
    for provider in all_providers(torch.device("cpu")):
        members.setdefault(provider.group, []).append(provider.name)
    groups = [f"  {group}: {', '.join(names)}" for group, names in members.items()]
    parser.epilog = "\n".join(["presets:", *presets, "", "providers, by group:", *groups])
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with those of the preset."""
    parser = make_parser()
    options = flags.parse(parser, arguments)
    options.preset = options.preset or ("quick" if options.device.type == "cuda" else "cpu")
    flags.restrict(parser, options, preset=PRESETS)
    preset = vars(flags.parse(parser, PRESETS[options.preset].split()))
    for pair in (("batch", "tokens"), ("heads", "channels")):
        given = [name for name in pair if getattr(options, name) is not None]
        if len(given) == 2:
            parser.error(f"--{pair[0]} and --{pair[1]} exclude each other")
        preset |= dict.fromkeys(pair) if given else {}
    # Times of a CPU scatter more, so measurements there last longer.
    usual = {"passes": list(flags.PASSES), "rep": 15.0 if options.device.type == "cuda" else 30.0}
    for values in (preset, usual):
        vars(options).update({name: value for name, value in values.items() if getattr(options, name) is None})
    return options


def problems(options: argparse.Namespace) -> list[Problem]:
    """The cases; lengths ascend within a series. Raises ValueError for sizes that do not fit."""
    found = []
    for dtype, mask, head_dim, length in itertools.product(
        options.dtypes, options.masks, options.head_dims, sorted(options.lengths)
    ):
        batch = options.batch or _quotient("tokens", options.tokens, "length", length)
        heads = options.heads
        if heads is None:
            heads = _quotient("channels", options.channels, "head dimension", head_dim)
        kv_heads = heads if options.kv_heads is None else options.kv_heads
        if kv_heads != heads and (not heads or heads % kv_heads):
            raise ValueError(f"--kv-heads must divide the {heads} heads; got {kv_heads}")
        sizes = batch, heads, kv_heads, head_dim, length
        found.append(Problem(dtype, mask, *sizes, v_head_dim=options.v_head_dim))
    return found


def _quotient(name: str, total: int, divisor: str, size: int) -> int:
    if total % size or total < size:
        raise ValueError(f"--{name} ({total}) must be a multiple of every {divisor}; got {size}")
    return total // size


def memory(problem: Problem, options: argparse.Namespace) -> int | None:
    """The memory of the providers that keep the score matrix, if one is measured."""
    chosen = chosen_providers(all_providers(torch.device("cpu")), options.providers)
    quadratic = any(provider.quadratic for provider in chosen)
    return max(problem.quadratic_bytes(which) for which in options.passes) if quadratic else None


def drive(sweep: harness.Sweep[Problem], cases: Sequence[Problem]) -> None:
    """Measure with `triton.testing.perf_report`, if Triton exists, and print its tables of times."""
    options, by_sizes = sweep.options, {(p.dtype, p.mask, p.head_dim, p.length): p for p in cases}
    groups = list(dict.fromkeys((p.dtype, p.mask, p.head_dim, which) for p in cases for which in options.passes))
    benchmarks = []
    for dtype, mask, head_dim, which in groups:
        lengths = [p.length for p in cases if (p.dtype, p.mask, p.head_dim) == (dtype, mask, head_dim)]
        fixed = {"dtype": dtype, "mask": mask, "head_dim": head_dim, "which": which}
        benchmarks.append(benchmark(lengths, options.providers, METRICS[0], **fixed))
    frames = run_perf_report(benchmarks, lambda *sizes: sweep.rows(by_sizes[sizes]), return_df=True)
    if frames is None:
        for case in cases:
            sweep.rows(case)
        return
    for (dtype, mask, head_dim, which), frame in zip(groups, frames, strict=True):
        print(f"\n{which}, ms: {dtype}, {mask}, d {head_dim}")
        table = frame.astype({"length": int}).rename(columns=lambda name: name.removesuffix(" (ms)"))
        print(table.to_string(index=False, na_rep="–", float_format=number))


PROGRAM = harness.Program(
    name="attention",
    title="Attention",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("preset", "providers", "passes", "rounds", "warmup", "rep", "max_seconds", "seed", "tf32"),
    notes=(
        "{rounds} rounds, in each of which every provider is measured once, in rotated order",
        "one measurement: 30 ms of pause, {warmup:g} ms of warm-up, {rep:g} ms of calls, timed on CUDA by device "
        "events, the L2 cache cleared before each, and elsewhere by the wall clock",
        "times are medians over the rounds; speed-ups are medians of the ratios within a round",
        "inputs are normal random numbers, seed {seed}",
    ),
    memory=memory,
    packages=PEER_DISTRIBUTIONS,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.redraw is not None:
        return harness.run(PROGRAM, options, [])
    try:
        cases = problems(options)
        chosen = chosen_providers(all_providers(torch.device("cpu")), options.providers)
        reasons = reasons_missing(options)
        options.missing = {provider.name: reasons[provider.name] for provider in chosen if reasons[provider.name]}
        providers = [provider for provider in chosen if provider.name not in options.missing]
        if not providers:
            texts = "; ".join(f"{name}: {reason}" for name, reason in options.missing.items())
            raise ValueError(f"--providers must name one that can be measured here; got {texts}")
    except ValueError as error:
        print(f"attention.py: error: {error}", file=sys.stderr)
        return 2
    options.providers = [provider.name for provider in providers]
    print(f"preset {options.preset} on {options.device}: {len(cases)} cases; {', '.join(options.passes)}")
    if options.device.type != "cuda":
        print(f"No GPU is used: these are times of the {options.device.type.upper()}, for small problems.")
    print(f"measured: {', '.join(options.providers)}")
    for name, reason in options.missing.items():
        print(f"not measured: {name} ({reason})")
    compiles = any(provider.compiles for provider in providers)
    program = dataclasses.replace(PROGRAM, preload=COMPILER if compiles else ())
    return harness.run(program, options, cases, drive)


if __name__ == "__main__":
    sys.exit(main())
