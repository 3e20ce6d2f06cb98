"""Training steps on several GPUs: tokens per second, how they scale, memory, and the longest sequence that fits.

    python benchmarks/scaling.py --models large --processes 1 2 4               # every mode, as much work per GPU
    python benchmarks/scaling.py --models large --scale strong --parallel context fsdp+context
    python benchmarks/scaling.py --models medium --longest --recompute-every 1 --loss-chunk 4096
    python benchmarks/scaling.py --models tiny --lengths 64 --batch 2 --processes 1 2 --device cpu

Each case has a group of processes. docs/measuring/scaling.md says what is measured, and what the columns mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import torch

from benchmarks.lib import flags, harness, models
from benchmarks.lib.harness import Context, Outcome, Row, Status
from benchmarks.lib.models import varying
from benchmarks.lib.process_groups import require_group_device, run_group, too_few_gpus, unsupported
from benchmarks.lib.tables import bullets, markdown, sections, with_columns
from benchmarks.parts import scaling_process
from benchmarks.parts.scaling_process import COMPILE, LONGEST, SCALES, STEP, STRONG, WEAK, ScalingCase
from cs336_systems.parallel import MODES
from cs336_systems.parallel.layout import NONE, WITH_CONTEXT
from cs336_systems.profiling.memory import MIB
from cs336_systems.transformer.presets import VOCAB_SIZE

LEAST_LENGTH = 64
_SAME = ["model", "suite", "vocab_size", "length", "batch", "compile", "warmup_steps", "recompute_every", "loss_chunk"]
_SAME_LOSS = 0.01
_FIGURES = ["median_ms", "std_ms", "tokens_per_second", "mfu", "peak_mib", "compile_s", "first_loss"]


_USUAL = "--suite 2025 --batch --compile --warmup-steps 3 --steps 10 --tf32"
_ON_A_GPU = "--models medium large --lengths 4096 --tokens 16384"
_WITHOUT = "--models tiny --lengths 128 --tokens 256"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    usual = f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}"
    parser = flags.make_parser(__doc__, usual, timeout=1800)
    add = parser.add_argument
    add("--vocab-size", type=flags.positive, default=VOCAB_SIZE, metavar="N", help="tokens (default: %(default)s)")
    several = [mode for mode in MODES if mode != NONE]
    text = f"of {', '.join(several)} (default: all)"
    add("--parallel", **flags.several(flags.one_of(*several)), metavar="MODE", help=text)
    text = "processes that share the work, each with a GPU if there are any (default: 1 2 4)"
    add("--processes", **flags.several(flags.positive), default=[1, 2, 4], metavar="N", help=text)
    add("--scale", choices=SCALES, help=f"whether the work grows with the processes (default: {WEAK})")
    add("--longest", action="store_true", help="search for the longest sequence that fits, instead of timing steps")
    add("--most", type=flags.positive, default=2**23, metavar="N", help="the longest length tried (%(default)s)")
    text = "how often the search halves the gap between what fits and what does not (default: 0)"
    add("--bisections", type=flags.count, default=0, metavar="N", help=text)
    add("--recompute-every", type=flags.positive, metavar="N", help="activation checkpointing, as in training")
    add("--loss-chunk", type=flags.positive, metavar="N", help="tokens whose logits are in memory, as in training")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Ends the program with a message if they do not fit together."""
    parser = make_parser(arguments)
    options = flags.parse(parser, arguments)
    flags.restrict(parser, options, compile=COMPILE)
    require_group_device(parser, options.device)
    if options.longest:
        if options.scale is not None:
            parser.error(f"--scale cannot be given with --longest, where all share one sequence; got {options.scale}")
        flags.restrict(parser, options, parallel=WITH_CONTEXT)
        if len(options.lengths) > 1 or len(options.warmup_steps) > 1:
            parser.error("--lengths and --warmup-steps must have one value with --longest")
    options.compile = options.compile or ["none" if options.longest else "auto"]
    options.scale = STRONG if options.longest else options.scale or WEAK
    options.parallel = options.parallel or [mode for mode in MODES if mode != NONE]
    if options.longest:
        options.parallel = [mode for mode in options.parallel if mode in WITH_CONTEXT]
    try:
        options.cases = scaling_cases(options)
    except ValueError as exception:
        parser.error(str(exception))
    return options


def scaling_cases(options: argparse.Namespace) -> list[ScalingCase]:
    """The cases; one process comes first, since others are compared with it. Raises ValueError for unknown models."""
    counts = sorted({*options.processes})
    groups = [(NONE, 1)] * (1 in counts) + [(mode, n) for n in counts if n > 1 for mode in options.parallel]
    for model in options.models:
        models.model_config(model, options.suite, context_length=options.lengths[0])
    batch = options.batch or (1 if options.longest else None)
    same = {name: getattr(options, name) for name in ("suite", "vocab_size", "scale", "recompute_every", "loss_chunk")}
    axes = (options.models, options.lengths, options.compile, options.warmup_steps, groups)
    return [
        ScalingCase(
            what=LONGEST if options.longest else STEP,
            model=model,
            parallel=parallel,
            processes=processes,
            length=length,
            batch=batch or max(1, options.tokens // length),
            compile=how,
            warmup_steps=warmup,
            **same,
        )
        for model, length, how, warmup, (parallel, processes) in itertools.product(*axes)
    ]


def least_memory(case: ScalingCase, options: argparse.Namespace) -> int:
    """Bytes of each device at least: float32 parameters, gradients and AdamW's two moments, in shares under fsdp."""
    shares = case.processes if case.parallel.startswith("fsdp") else 1
    return 16 * case.config.parameters() // shares


def impossible(case: ScalingCase, device: torch.device) -> Outcome | None:
    """The outcome `unsupported` if this machine or these sizes exclude the case."""
    reason = None
    if few := too_few_gpus(case.processes, device):
        reason = few
    elif not case.shares_sequences and case.sequences % case.processes:
        reason = f"{case.sequences} sequences cannot be divided among {case.processes} processes"
    elif case.shares_sequences and case.step_length < 2 * case.processes:
        reason = f"{case.processes} processes cannot share {case.step_length} tokens"
    return unsupported(reason)


def measure(case: ScalingCase, context: Context) -> Row:
    """The figures of a group of processes. This process does not use a GPU."""
    options = context.options
    row = case.work_columns
    refused = impossible(case, options.device)
    if refused is not None:
        return row | refused.columns
    row |= run_group(scaling_process.measure, case, case.processes, case.parallel, options)
    peaks = [size / MIB for size in row.pop("peak_bytes_of_each", ()) if size is not None]
    return row | {"peak_mib": max(peaks, default=None), "peak_mib_of_each": peaks}


def search(fits: Callable[[int], bool], first: int, most: int, bisections: int) -> tuple[int | None, int | None]:
    """The longest length that fits and the shortest that does not, of those tried.

    Doubles or halves the first length, and then bisects. Raises what ``fits`` raises.
    """
    good, bad, length = None, None, first
    while length <= most and bad is None:
        if fits(length):
            good, length = length, 2 * length
        else:
            bad = length
    while good is None and bad is not None and bad // 2 >= LEAST_LENGTH:
        if fits(bad // 2):
            good = bad // 2
        else:
            bad //= 2
    for _ in range(bisections):
        if good is not None and bad is not None:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


class UnknownError(Exception):
    """A length failed for another reason than memory."""


def drive(sweep: harness.Sweep[ScalingCase], cases: Sequence[ScalingCase]) -> None:
    """Measure the cases, or search for the longest length from each."""
    options = sweep.options
    for case in cases:
        if case.what == STEP:
            sweep.rows(case)
            continue

        def fits(length: int, case: ScalingCase = case) -> bool:
            (row,) = sweep.rows(dataclasses.replace(case, length=length))
            if row["status"] not in (Status.OK.value, Status.OUT_OF_MEMORY.value):
                raise UnknownError(f"{row['status']} at {length}: {row['reason']}")
            return bool(row["status"] == Status.OK.value)

        name = f"{case.model} {case.parallel} on {case.processes}"
        try:
            longest, shortest = search(fits, case.length, options.most, options.bisections)
        except UnknownError as exception:
            sweep.note(f"{name}: the search ends: {exception}")
        else:
            sweep.note(f"{name}: {longest or 'nothing'} fits, {shortest or 'nothing tried'} does not")


def tables(frame: pd.DataFrame) -> str:
    """Timed steps, searches for the longest sequence, and warnings."""
    frame = with_columns(frame, _FIGURES)
    steps = with_efficiency(frame[frame["what"] == STEP])
    axes = ["model", "sequences", "step_length", "scale", "parallel", "processes"]
    figures = [*_FIGURES[:3], "efficiency", "work_efficiency", *_FIGURES[3:6]]
    others = [name for name in varying(frame, _SAME[5:]) if name not in axes]
    return sections(
        {
            "Steps": markdown(steps[[*axes, *others, *figures, "status"]]) if len(steps) else "",
            "Longest sequence that fits": longest(frame[frame["what"] == LONGEST]),
            "Losses": bullets(wrong_losses(steps)),
        }
    )


def with_efficiency(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``efficiency``, tokens per second over n times those of one process with the work of one, and
    ``work_efficiency``, the same with FLOPs per second.

    n processes that are n times as fast have an efficiency of 1. Tokens of longer sequences need more FLOPs.
    """
    one = frame[frame["parallel"] == NONE].drop_duplicates(_SAME)
    base = frame[_SAME].merge(one, "left", _SAME).set_index(frame.index)
    efficiency = frame["tokens_per_second"] / (frame["processes"] * base["tokens_per_second"])
    work = efficiency * frame["flops_per_token"] / base["flops_per_token"]
    return frame.assign(efficiency=efficiency, work_efficiency=work, loss_of_one=base["first_loss"])


def wrong_losses(frame: pd.DataFrame) -> list[str]:
    """Warnings: with --scale strong all have the same tokens and parameters, and so the same first loss."""
    strong = frame[(frame["scale"] == STRONG) & ((frame["first_loss"] / frame["loss_of_one"] - 1).abs() > _SAME_LOSS)]
    return [
        f"{row['case']}: the first loss is {row['first_loss']:.4f}, and {row['loss_of_one']:.4f} on one process; "
        "one of them is wrong"
        for row in strong.to_dict("records")
    ]


def longest(frame: pd.DataFrame) -> str:
    """For each mode and number of processes the longest length that fitted, and the shortest that did not."""
    axes = ["model", "suite", "vocab_size", "compile", "recompute_every", "loss_chunk", "parallel", "processes"]
    lines = []
    for key, rows in frame.groupby(axes, sort=False, dropna=False):
        fits, fails = rows[rows["status"] == "ok"], rows[rows["status"] != "ok"]
        line = dict(zip(axes, key, strict=True))
        if len(fits):
            best = fits.loc[fits["step_length"].idxmax()]
            line |= {"longest": best["step_length"], "peak_mib": best["peak_mib"], "step_s": best["median_ms"] / 1e3}
        if len(fails):
            worst = fails.loc[fails["step_length"].idxmin()]
            line["did not fit"] = f"{worst['step_length']} ({worst['status']})"
        lines.append(line)
    if not lines:
        return ""
    table = pd.DataFrame(lines).reindex(columns=[*axes, "longest", "peak_mib", "step_s", "did not fit"])
    one = table[table["parallel"] == NONE].drop_duplicates(axes[:-2])
    ratio = table["longest"] / table[axes[:-2]].merge(one, "left", axes[:-2])["longest"]
    text = ["–" if pd.isna(value) else f"{int(value):,}" for value in table["longest"]]
    shown = [*varying(table, axes[:-2]), *axes[-2:]]
    rest = table[["peak_mib", "step_s", "did not fit"]]
    return markdown(table[shown].assign(longest=text, over_one=ratio).join(rest))


PROGRAM = harness.Program(
    name="scaling",
    title="Several GPUs",
    measure=measure,
    tables=tables,
    settings=("steps", "tf32", "seed"),
    notes=(
        "{steps} consecutive steps after the warm-up, whose first step compiles; with --longest, one step",
        "float32 parameters, bfloat16 autocast, gradient clipping, fused AdamW",
        "weak: each process has as many tokens as one process alone, in its own sequences or in a part of longer ones; "
        "strong: all processes together have them",
        "MFU is of one GPU, with all query-key pairs; mfu_causal without the masked ones",
        "efficiency: tokens/s over n times those of one process; work_efficiency: the same with FLOPs, since tokens of "
        "longer sequences need more",
        "times are those of the slowest process in each step, peaks those of the highest",
    ),
    memory=least_memory,
    isolated=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    return harness.run(PROGRAM, options, options.cases, drive)


if __name__ == "__main__":
    sys.exit(main())
