"""Figures by formula, tables and plots of memory.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.lib.flags import DTYPES
from benchmarks.lib.harness import Row
from benchmarks.lib.models import AXES, FORWARD, STEP, ModelCase, paired, varying
from benchmarks.lib.tables import markdown, new_figure, plot_bars, plot_lines, sections, with_columns
from cs336_systems.profiling.memory import MIB

PEAK, LARGEST = "peak: ", "largest: "
"""Prefixes of the columns with a size for each category."""
_AXES = (*AXES, "recompute_every")
_FIGURES = ["before_mib", "peak_mib", "reserved_mib", "held_mib", "saved_mib", "parameter_copies_mib", "block_mib"]
_FIGURES += ["residual_mib", "quadratic_mib", "quadratic_saved_mib", "median_ms"]


def size_columns(case: ModelCase) -> Row:
    """By formula, in MiB: the residual stream, one tensor of all scores, and those that naive attention saves."""
    config = case.config
    every: int = getattr(case, "recompute_every", None) or config.num_layers
    layers = min(every, config.num_layers) if case.mode != FORWARD and case.provider == "naive" else 0
    quadratic = case.batch * config.num_heads * case.length**2 * DTYPES[case.dtype].itemsize
    return {
        "residual_mib": case.tokens * config.d_model * 4 / MIB,
        "quadratic_mib": quadratic / MIB,
        "quadratic_saved_mib": layers * quadratic / MIB,
    }


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with all columns, and "none" for no recomputation, since a whole number beside None would be a float."""
    frame = with_columns(frame, _FIGURES)
    every = ["none" if pd.isna(value) else str(int(value)) for value in frame["recompute_every"]]
    return frame.assign(recompute_every=every)


def categories(frame: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """The columns with a prefix, without it."""
    return frame.filter(regex=f"^{prefix}").rename(columns=lambda name: name.removeprefix(prefix))


def tables(frame: pd.DataFrame) -> str:
    """All rows; float32 and mixed precision; memory by category; activation checkpointing. All in MiB."""
    frame = complete(frame)
    axes = varying(frame, _AXES)
    done = frame[frame["status"] == "ok"]
    figures = {"peak_mib": "peak, MiB", "held_mib": "held, MiB", "median_ms": "ms"}
    peaks, largest = (
        markdown(done[axes].join(categories(done, prefix))) if len(done) else "" for prefix in (PEAK, LARGEST)
    )
    return sections(
        {
            "All rows, MiB": markdown(frame[[*axes, *_FIGURES, "status"]]),
            "float32 and mixed precision": paired(frame, "dtype", "float32", figures, _AXES),
            "At the peak of the recording, MiB": peaks,
            "Largest allocation of each category, MiB": largest,
            "Activation checkpointing": checkpointing(done),
        }
    )


def checkpointing(frame: pd.DataFrame) -> str:
    """Steps that differ in the number of blocks recomputed together alone; "" without any."""
    rows = checkpointed(frame)
    others = [name for name in varying(rows, _AXES) if name != "recompute_every"]
    return markdown(rows[[*others, "recompute_every", "peak_mib", "held_mib", "median_ms"]]) if len(rows) else ""


def checkpointed(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of each configuration of which some recompute blocks, fewest blocks first."""
    rows = frame[frame["mode"] == STEP]
    recomputes = rows["recompute_every"] != "none"
    several = recomputes.groupby([rows[name] for name in AXES]).transform("any")
    order = rows["recompute_every"].replace("none", "0").astype(int)
    return rows.assign(order=order)[several.astype(bool)].sort_values([*AXES, "order"], kind="stable")


def draw_timeline(path: Path, timeline: pd.DataFrame, phases: Sequence[tuple[str, int]], title: str) -> None:
    """Plot memory over time by category, with the begin of each phase. Needs matplotlib."""
    shown = timeline.loc[:, timeline.any()] / MIB
    with new_figure(path, figsize=(10, 5.5)) as (figure, axes):
        shown.plot.area(
            ax=axes, linewidth=0, xlabel="allocations and frees", ylabel="MiB", colormap="tab20", legend=False
        )
        for name, event in phases:
            axes.axvline(event, color="black", linestyle="--", linewidth=0.8)
            axes.annotate(name, (event, 1.0), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=8)
        axes.set_title(title, fontsize=9)
        figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot the peak over the length, the peak by category, and checkpointing's peak and time."""
    frame = complete(frame)
    frame = frame[frame["status"] == "ok"]
    if frame.empty:
        return
    plain = frame[frame["recompute_every"] == "none"]
    lines = plain[["provider", "dtype", "mode"]].agg(" ".join, axis="columns")
    line: dict[str, Any] = {"line": "line", "panel": "model"}
    peaks = plain.assign(line=lines)
    plot_lines(folder / "peak.png", peaks, x="length", y="peak_mib", title="Peak memory", y_label="MiB", **line)
    bars = categories(frame.set_index("case"), PEAK)
    plot_bars(folder / "categories.png", bars, title="Allocated at the peak of the recording", label="MiB")
    steps = checkpointed(frame).rename(columns={"order": "blocks"})
    steps = steps[steps["blocks"] > 0].assign(line=lambda rows: rows["provider"] + " " + rows["dtype"])
    for column, label in (("peak_mib", "peak, MiB"), ("median_ms", "ms")):
        path, title = folder / f"checkpointing-{column.partition('_')[0]}.png", "Steps with blocks recomputed together"
        plot_lines(path, steps, x="blocks", y=column, title=title, y_label=label, log_y=False, **line)
