"""The time of each phase of a model's step: forward, backward, and AdamW's update.

    python benchmarks/transformer.py                                             # a first look, GPU or not
    python benchmarks/transformer.py --models small medium --lengths 512 1024 --dtypes fp32 bf16
    python benchmarks/transformer.py --models small --modes step --warmup-steps 0 1 2 5 --compile none whole
    python benchmarks/transformer.py --models 4-256-256-4-8 8-512-768-12-12 --compile none whole
    python benchmarks/transformer.py --models tiny --d-model 512 --d-ff 2048 --num-heads 8 --log-steps

docs/measuring/steps.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
from torch import Tensor

from benchmarks.lib import flags, harness, models
from benchmarks.lib.harness import Context, Row
from benchmarks.lib.intervals import marks, quotient, with_interval
from benchmarks.lib.models import AXES, FORWARD, FORWARD_BACKWARD, NOT_COMPILED, PHASES, ModelCase, paired, varying
from benchmarks.lib.results import mebibytes
from benchmarks.lib.steps import finite_loss, make_step, most_steps_of, step_columns
from benchmarks.lib.tables import markdown, plot_bars, plot_lines, sections, with_columns
from cs336_systems.profiling.environment import device_name
from cs336_systems.profiling.flops import device_peak, implausible_rate, teraflops_per_second
from cs336_systems.profiling.steps import StepTimes, time_steps
from cs336_systems.profiling.timing import RoundTimes
from cs336_systems.profiling.torch_names import compiler_counters

PREFIXES = {**{phase: f"{phase}_" for phase in (*PHASES, "both")}, "step": ""}
"""By what has a time, the prefix of its columns; the whole step's have none, and `both` is forward and backward."""
STATISTICS = ("median_ms", "low_ms", "high_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "cv")


_USUAL = "--batches 4 --providers auto --dtypes fp32 bf16 --compile none --modes forward step --no-tf32"
_USUAL += " --steps 10 --most-steps"
_ON_A_GPU = "--models small --lengths 128 256 512 1024 --warmup-steps 5"
_WITHOUT = "--models tiny --lengths 32 64 --warmup-steps 1"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    parser.add_argument("--log-steps", action="store_true", help="print the time of every step")
    return parser


def measure(case: ModelCase, context: Context) -> Row:
    """The time of each phase of a case, with its rates, memory, compilation and losses."""
    options = context.options
    skipped = models.smaller_out_of_memory(case, context.rows)
    if skipped is not None:
        return skipped.columns
    step, _ = make_step(case, options.device, options.seed)
    losses: list[Tensor] = []
    how: dict[str, Any] = {"device": options.device, "steps": options.steps, "warmup": case.warmup_steps}
    how["most_steps"] = most_steps_of(options)
    between = step.model.zero_grad if case.mode == FORWARD_BACKWARD else None
    times = time_steps(step.phases(case.mode, losses), between=between, **how)
    row = time_columns(times) | compilation_columns(case, times)
    row |= {name: finite_loss(losses[index], case.dtype) for name, index in (("first_loss", 0), ("last_loss", -1))}
    return row | rates_of(case, row, device_name(options.device))


def time_columns(times: StepTimes) -> Row:
    """The times of the step, its phases, and forward and backward together; the clock's, and the allocator's figures.

    `host_ms` is the host's least time of a step.
    """
    row = step_columns(times.step)
    row |= {"clock_ms": times.clock_ms, "host_ms": min(times.host_ms), "host_bound": times.is_host_bound}
    phases = dict(times.phases)
    if "backward" in phases:
        each = (phases[name].milliseconds for name in ("forward", "backward"))
        phases["both"] = RoundTimes(tuple(map(sum, zip(*each, strict=True))))
    for phase, rounds in phases.items():
        row |= step_columns(rounds, PREFIXES[phase])
    memory = times.memory
    sizes = {"allocated_mib": memory.allocated_bytes, "reserved_mib": memory.reserved_bytes}
    return row | mebibytes(**sizes, peak_mib=memory.peak_bytes)


def compilation_columns(case: ModelCase, times: StepTimes) -> Row:
    """The first step and the other warm-up steps, and the number of graphs that torch found in its cache and compiled.

    ``compile_s`` is how much longer the first step took than a later one: compilation, and what is loaded once.
    """
    found, compile_s = compiler_counters(), max(0.0, times.first_ms - times.step.median) * 1e-3
    return {
        "warmup_ms": list(times.warmup_ms),
        "first_step": "warm-up" if case.warmup_steps else "timed",
        "first_step_ms": times.first_ms,
        "compile_s": compile_s if case.warmup_steps else None,
        "graphs_from_cache": found["fxgraph_cache_hit"],
        "graphs_compiled": found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"],
    }


def rates_of(case: ModelCase, row: Row, device: str) -> Row:
    """Tokens per second, MFU, the rate of each phase in TFLOP/s, and warnings.

    A rate is implausible if it is above the device's peak even without the pairs that the causal mask hides, which
    some kernels do not compute.
    """
    forward, causal = (models.step_flops(case.config, case.tokens, FORWARD, every_pair=p) for p in (True, False))
    passes = {"forward": 1.0, "backward": 2.0, "step": 1.0 if case.mode == FORWARD else 3.0}
    rates, warnings = dict.fromkeys(f"{name}_tflops" for name in passes), []
    for name, count in passes.items():
        if median := row.get(f"{PREFIXES[name]}median_ms"):
            rates[f"{name}_tflops"] = teraflops_per_second(count * forward, median)
            least = teraflops_per_second(count * causal, median)
            implausible = implausible_rate(least, device, case.dtype, tf32=case.tf32)
            warnings += [f"{name}: {implausible}"] if implausible else []
    if row["last_loss"] is None:
        warnings.append("the last loss is not finite: gradients are not scaled")
    known = device_peak(device)
    peak = None if known is None else known.rate(case.dtype, tf32=case.tf32)
    columns = models.rate_columns(case.config, case.tokens, case.mode, row["median_ms"], peak)
    return {**columns, **rates, "warning": "; ".join(warnings)}


def step_lines(row: Row) -> list[str]:
    """A line for every step of a row: the whole step for warm-up steps, every phase for timed ones."""
    lines = [f"  warm-up step {number}: {time:.3f} ms" for number, time in enumerate(row.get("warmup_ms", ()), 1)]
    columns = {name: row[f"{prefix}steps_ms"] for name, prefix in PREFIXES.items() if f"{prefix}steps_ms" in row}
    for index, times in enumerate(zip(*columns.values(), strict=True), 1):
        phases = ", ".join(f"{name} {time:.3f} ms" for name, time in zip(columns, times, strict=True))
        lines.append(f"  step {index}: {phases}")
    return lines


def drive(sweep: harness.Sweep[ModelCase], cases: Sequence[ModelCase]) -> None:
    """Measure the cases in order; with --log-steps, print the time of every step."""
    for case in cases:
        for row in sweep.rows(case):
            if sweep.options.log_steps:
                print("\n".join([case.name, *step_lines(row)]), flush=True)


def tables(frame: pd.DataFrame) -> str:
    """All rows, and the tables that follow from them."""
    frame = with_derived(frame)
    memory = ["allocated_mib", "reserved_mib", "peak_mib"]
    times = {f"{name}, ms": [interval(row, name) for row in frame.to_dict("records")] for name in PREFIXES}
    times["step, ms"] = times["step, ms"] + marks(frame)
    rest = frame[["tokens_per_second", "step_tflops", "mfu", *memory, "status"]]
    whole = frame[[*varying(frame), "parameters"]].assign(**times).join(rest)
    figures = {"forward_median_ms": "forward, ms", "backward_median_ms": "backward, ms"}
    figures |= {"both_median_ms": "both, ms", "median_ms": "step, ms", "peak_mib": "peak, MiB"}
    return sections(
        {
            "All rows: medians, with their 95 % confidence intervals": markdown(whole),
            "(forward + backward) / forward": ratios(frame),
            "float32 and other dtypes": paired(frame, "dtype", "float32", figures),
            "Eager and compiled": paired(frame, "compile", NOT_COMPILED, figures),
            "Naive attention and other implementations": paired(frame, "provider", "naive", figures),
            "Effect of warm-up": warm_up(frame),
            "Statistics of every phase": phase_statistics(frame),
        }
    )


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with all columns of times, and with TF32 named as a dtype."""
    columns = [f"{prefix}{name}" for prefix in PREFIXES.values() for name in (*STATISTICS, "steps_ms")]
    others = ["first_step_ms", "tokens_per_second", "step_tflops", "mfu", "allocated_mib", "reserved_mib", "peak_mib"]
    frame = with_columns(frame, columns + others)
    tf32 = (frame["dtype"] == "float32") & frame["tf32"]
    return frame.assign(dtype=frame["dtype"].mask(tf32, "float32 (TF32)"))


def interval(row: Row, name: str) -> str:
    """`12.3 (12.1 to 12.6)`, or a dash."""
    return with_interval(*(row[f"{PREFIXES[name]}{column}_ms"] for column in ("median", "low", "high")))


def ratios(frame: pd.DataFrame) -> str:
    """Forward and backward over the forward of the same steps, and over a forward under ``no_grad``; "" without any."""
    frame, same = frame[frame["status"] == "ok"], [name for name in AXES if name != "mode"]
    trained = frame[frame["both_median_ms"].notna()].drop_duplicates(same)
    if trained.empty:
        return ""
    alone = frame[frame["mode"] == FORWARD][[*same, "median_ms", "low_ms", "high_ms"]]
    pairs = trained.merge(alone, "left", same, suffixes=("", "_no_grad"))
    shown = pairs[varying(pairs)].assign(
        **{
            "forward, no_grad, ms": pairs["median_ms_no_grad"],
            "forward, ms": pairs["forward_median_ms"],
            "both, ms": pairs["both_median_ms"],
            "both / no_grad": [_over(row, "median_ms_no_grad") for row in pairs.to_dict("records")],
            "both / forward": [_over(row, "forward_median_ms") for row in pairs.to_dict("records")],
        }
    )
    return markdown(shown)


def _over(row: Row, below: str) -> str:
    """Forward and backward over another time of the row, and the interval of that."""
    return with_interval(*(quotient(row, row, "both_median_ms", below) or (None,) * 3))


def warm_up(frame: pd.DataFrame) -> str:
    """Rows that differ in the number of warm-up steps alone, with the ratio of the mean to the warmest; else "".

    The total is that of the timed steps.
    """
    frame = frame[frame["status"] == "ok"].sort_values("warmup_steps", kind="stable")
    groups = frame.groupby([name for name in AXES if name != "warmup_steps"], sort=False)
    ratio, total = frame["mean_ms"] / groups["mean_ms"].transform("last"), frame["steps_ms"].map(sum)
    frame = frame.assign(**{"mean over the warmest's": ratio, "total_ms": total})
    several = frame[groups["mean_ms"].transform("size") > 1].sort_values([*AXES], kind="stable")
    figures = ["first_step_ms", "total_ms", "mean_ms", "std_ms", "median_ms", "max_ms", "cv", "mean over the warmest's"]
    return "" if several.empty else markdown(several[[*varying(several), *figures]])


def phase_statistics(frame: pd.DataFrame) -> str:
    """Every statistic of the step and of each phase, their totals and shares of the step; "" without any."""
    parts = []
    for name, prefix in PREFIXES.items():
        rows = frame[frame[f"{prefix}mean_ms"].notna()]
        part = rows[[*varying(frame), *(prefix + column for column in STATISTICS)]]
        part.insert(len(varying(frame)), "phase", name)
        part = part.rename(columns=lambda column, prefix=prefix: column.removeprefix(prefix))
        total, share = rows[f"{prefix}steps_ms"].map(sum), rows[f"{prefix}mean_ms"] / rows["mean_ms"]
        parts.append(part.assign(total_ms=total, **{"share of the step": share}))
    return markdown(pd.concat(parts)) if any(len(part) for part in parts) else ""


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot the time of a step over the length, and the phases of each row as stacked bars."""
    frame = with_derived(frame)
    frame = frame[frame["status"] == "ok"]
    if frame.empty:
        return
    names = [name for name in varying(frame) if name not in ("model", "length")]
    lines = frame.assign(line=frame[names].astype(str).agg(" ".join, axis="columns"))
    path, title = folder / "step-over-length.png", "Time of a step: all phases of the mode"
    plot_lines(path, lines, x="length", y="median_ms", line="line", panel="model", title=title, y_label="ms")
    phases = frame.set_index("case")[[f"{phase}_median_ms" for phase in PHASES]].set_axis([*PHASES], axis="columns")
    plot_bars(folder / "phases.png", phases, title="Phases of a step: medians", label="ms")


PROGRAM = harness.Program(
    name="transformer",
    title="Time of a model's phases",
    measure=measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "seed"),
    notes=(
        "{steps} consecutive steps after the warm-up; the phases of a step are measured within that step",
        "forward: the loss, under no_grad in mode forward; optimizer: gradient clipping, fused AdamW, gradients freed",
        "parameters are float32; bfloat16 and float16 are autocast, without loss scaling for float16",
        "with 0 warm-up steps the first step, which compiles and loads code, is one of the timed steps",
        "TFLOP/s and MFU count the model's matrix products and all query-key pairs, as FlopCounterMode does, and twice "
        "as much for the backward; MFU is the share of the device's peak for the dtype",
        "memory: allocated after the last step, reserved from the driver, and the peak of the timed steps",
    ),
    memory=models.least_memory,
    packages=("transformers",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return models.run_models(PROGRAM, make_parser(arguments), arguments, drive)


if __name__ == "__main__":
    sys.exit(main())
