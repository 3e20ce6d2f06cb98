"""Tables and plots of the time of a model's phases, from the rows of transformer.py."""

from __future__ import annotations

import statistics
from pathlib import Path

import pandas as pd

from benchmarks.harness import Row
from benchmarks.models import AXES, FORWARD, NOT_COMPILED, paired, sections, varying
from benchmarks.tables import markdown, number, plot_bars, plot_lines, with_columns
from cs336_systems.profiling.report import ABSENT
from cs336_systems.profiling.steps import PHASES

PREFIXES = {**{phase: f"{phase}_" for phase in PHASES}, "step": ""}
"""By what has a time, the prefix of its columns: the columns of the whole step have none."""
STATISTICS = ("mean_ms", "std_ms", "min_ms", "max_ms", "median_ms", "cv")


def tables(frame: pd.DataFrame) -> str:
    """All rows, and the tables that follow from them."""
    frame = with_derived(frame)
    memory = ["allocated_mib", "reserved_mib", "peak_mib"]
    times = {f"{name}, ms": [with_deviation(row, name) for row in frame.to_dict("records")] for name in PREFIXES}
    rest = frame[["tokens_per_second", "step_tflops", "mfu", *memory, "status"]]
    whole = frame[[*varying(frame), "parameters"]].assign(**times).join(rest)
    figures = {"forward_median_ms": "forward, ms", "backward_median_ms": "backward, ms"}
    figures |= {"both_ms": "both, ms", "median_ms": "step, ms", "peak_mib": "peak, MiB"}
    return sections(
        {
            "All rows: median ± standard deviation": markdown(whole),
            "(forward + backward) / forward": ratios(frame),
            "float32 and other dtypes": paired(frame, "dtype", "float32", figures),
            "Eager and compiled": paired(frame, "compile", NOT_COMPILED, figures),
            "Naive attention and other implementations": paired(frame, "provider", "naive", figures),
            "Effect of warm-up": warm_up(frame),
            "Statistics of every phase": phase_statistics(frame),
        }
    )


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with all columns of times, with ``both_ms``, and with TF32 named as a dtype."""
    columns = [f"{prefix}{name}" for prefix in PREFIXES.values() for name in (*STATISTICS, "steps_ms")]
    others = ["first_step_ms", "tokens_per_second", "step_tflops", "mfu", "allocated_mib", "reserved_mib", "peak_mib"]
    frame = with_columns(frame, columns + others)
    tf32 = (frame["dtype"] == "float32") & frame["tf32"]
    both = [both_ms(row) for row in frame.to_dict("records")]
    return frame.assign(dtype=frame["dtype"].mask(tf32, "float32 (TF32)"), both_ms=both)


def both_ms(row: Row) -> float | None:
    """The median over the steps of forward and backward together; None without a backward."""
    each = row["forward_steps_ms"], row["backward_steps_ms"]
    return statistics.median(map(sum, zip(*each, strict=True))) if all(isinstance(x, list) for x in each) else None


def with_deviation(row: Row, name: str) -> str:
    """`12.3 ± 0.4`, or a dash."""
    median, deviation = (row[f"{PREFIXES[name]}{column}"] for column in ("median_ms", "std_ms"))
    return ABSENT if pd.isna(median) else f"{number(float(median))} ± {number(float(deviation))}"


def ratios(frame: pd.DataFrame) -> str:
    """Forward and backward over the forward of the same steps, and over a forward under ``no_grad``; "" without any."""
    frame, same = frame[frame["status"] == "ok"], [name for name in AXES if name != "mode"]
    trained = frame[frame["both_ms"].notna()].drop_duplicates(same)
    if trained.empty:
        return ""
    alone = frame[frame["mode"] == FORWARD][[*same, "median_ms"]]
    pairs = trained.merge(alone, "left", same, suffixes=("", "_no_grad"))
    shown = pairs[varying(pairs)].assign(
        **{
            "forward, no_grad, ms": pairs["median_ms_no_grad"],
            "forward, ms": pairs["forward_median_ms"],
            "both, ms": pairs["both_ms"],
            "both / no_grad": pairs["both_ms"] / pairs["median_ms_no_grad"],
            "both / forward": pairs["both_ms"] / pairs["forward_median_ms"],
        }
    )
    return markdown(shown)


def warm_up(frame: pd.DataFrame) -> str:
    """Rows that differ in the number of warm-up steps alone, with the ratio of the mean to the warmest; else ""."""
    frame = frame[frame["status"] == "ok"].sort_values("warmup_steps", kind="stable")
    groups = frame.groupby([name for name in AXES if name != "warmup_steps"], sort=False)
    frame = frame.assign(ratio=frame["mean_ms"] / groups["mean_ms"].transform("last"))
    several = frame[groups["mean_ms"].transform("size") > 1].sort_values([*AXES], kind="stable")
    figures = ["first_step_ms", "mean_ms", "std_ms", "median_ms", "max_ms", "cv", "ratio"]
    shown = several[[*varying(several), *figures]].rename(columns={"ratio": "mean over the warmest's"})
    return "" if several.empty else markdown(shown)


def phase_statistics(frame: pd.DataFrame) -> str:
    """Every statistic of the step and of each phase; "" without any."""
    parts = []
    for name, prefix in PREFIXES.items():
        part = frame[[*varying(frame), *(prefix + column for column in STATISTICS)]].dropna(subset=[f"{prefix}mean_ms"])
        part.insert(len(varying(frame)), "phase", name)
        parts.append(part.rename(columns=lambda column, prefix=prefix: column.removeprefix(prefix)))
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
