"""The plots of the pages that answer a question, from the rows of all parts of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.lib.models import FORWARD, NOT_COMPILED, STEP
from benchmarks.lib.results import Status
from benchmarks.lib.tables import plot_bars, plot_lines
from cs336_systems.profiling.kernel_classes import CLASSES

_OK = f"status == '{Status.OK.value}'"
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def timing(rows: pd.DataFrame, prefix: Path) -> None:
    """Forward, and whole step, over the length."""
    rows = rows.query(f"{_OK} and compile == '{NOT_COMPILED}' and batch == 4")
    for mode, title in ((FORWARD, "Forward"), (STEP, "Step: forward, backward, AdamW")):
        _over_length(_file(prefix, mode), rows[rows["mode"] == mode], "median_ms", title, ["provider", "dtype"])


def warm_up(rows: pd.DataFrame, prefix: Path) -> None:
    """The first steps, without warm-up."""
    rows = rows.query(f"{_OK} and warmup_steps == 0 and mode == '{STEP}'")
    rows = rows.assign(ms=rows["steps_ms"].map(_numbers)).explode("ms")
    rows = rows.assign(step=rows.groupby("case").cumcount() + 1, ms=rows["ms"].astype(float))
    title = "The first steps of a process"
    plot_lines(_file(prefix, "steps"), rows, x="step", y="ms", line="model", panel="length", title=title, y_label="ms")


def precision(rows: pd.DataFrame, prefix: Path) -> None:
    """How many times as fast a step is in bfloat16."""
    rows = rows.query(f"{_OK} and compile == '{NOT_COMPILED}' and mode == '{STEP}' and batch == 4")
    index = ["model", "length", "provider", "parameters"]
    pairs = rows.drop_duplicates([*index, "dtype"]).pivot(index=index, columns="dtype", values="median_ms")
    if {"float32", "bfloat16"} <= {*pairs}:
        ratio = (pairs["float32"] / pairs["bfloat16"]).rename("ratio").reset_index().sort_values("parameters")
        how: dict[str, Any] = {"x": "length", "y": "ratio", "line": "model", "panel": "provider"}
        title = "Step: time in float32 over bfloat16"
        plot_lines(_file(prefix, "speedup"), ratio, title=title, log_y=False, y_label="times", **how)


def kernels(rows: pd.DataFrame, prefix: Path) -> None:
    """The shares of the classes of kernels in the step at the longest length."""
    rows = rows.query(f"{_OK} and mode == '{STEP}'").dropna(subset=["work_ms"])
    rows = rows[rows["length"] == rows["length"].max()].sort_values(["dtype", "parameters"])
    bars = rows.set_index(rows["model"].astype(str) + " " + rows["dtype"].map(_short))
    shares = bars[[f"share_{name.replace(' ', '_')}" for name in CLASSES]].set_axis([*CLASSES], axis="columns")
    length = "" if rows.empty else f", {rows['length'].iloc[0]:.0f} tokens"
    plot_bars(_file(prefix, "shares"), shares, title=f"Kernels of a step{length}", label="share of their time")


def memory(rows: pd.DataFrame, prefix: Path) -> None:
    """The peak over the length."""
    rows = rows.query(_OK)
    rows = rows[rows["recompute_every"].isna()]
    _over_length(_file(prefix, "peak"), rows, "peak_mib", "Peak memory", ["mode", "dtype"], "MiB")


def attention(rows: pd.DataFrame, prefix: Path) -> None:
    """Time of both passes, and what is held for the backward."""
    rows = rows.query(f"{_OK} and dtype == 'float32' and mask == 'full' and length >= 256")
    rows = rows.sort_values(["head_dim", "length"])
    for which, column, label in (
        ("forward", "median_ms", "ms"),
        ("backward", "median_ms", "ms"),
        ("backward", "held_mib", "MiB held"),
    ):
        path = _file(prefix, f"{which}-{label.split()[-1]}")
        how: dict[str, Any] = {"x": "length", "y": column, "line": "provider", "panel": "head_dim", "y_label": label}
        plot_lines(path, rows[rows["pass"] == which], title=f"Attention, float32: {which}", **how)


def causal(rows: pd.DataFrame, prefix: Path) -> None:
    """Time of forward and backward together over the length, in bfloat16."""
    rows = rows.query(f"{_OK} and dtype == 'bfloat16' and `pass` == 'both'").sort_values(["head_dim", "length"])
    how: dict[str, Any] = {"x": "length", "y": "median_ms", "line": "provider", "panel": "head_dim", "y_label": "ms"}
    plot_lines(_file(prefix, "both"), rows, title="Causal attention, bfloat16: forward and backward", **how)


def compilation(rows: pd.DataFrame, prefix: Path) -> None:
    """How many times as fast compiled attention is."""
    if "speedup_over_naive" in rows:
        rows = rows.query(f"{_OK} and provider == 'compiled' and dtype == 'float32' and mask == 'full'")
        how: dict[str, Any] = {"x": "length", "y": "speedup_over_naive", "line": "head_dim", "panel": "pass"}
        title = "Compiled attention: times as fast as naive, float32"
        rows = rows.sort_values("head_dim")
        plot_lines(_file(prefix, "attention"), rows, title=title, log_y=False, y_label="times", **how)


def _over_length(path: Path, rows: pd.DataFrame, y: str, title: str, lines: list[str], label: str = "ms") -> None:
    """A column over the length, with axes for each model, and a line for each combination of the other columns."""
    names = [" ".join(map(_short, each)) for each in rows[lines].itertuples(index=False)]
    rows = rows.assign(line=names).sort_values("parameters", kind="stable")
    plot_lines(path, rows, x="length", y=y, line="line", panel="model", title=title, y_label=label)


def _file(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}-{name}.png")


def _short(name: object) -> str:
    return _SHORT.get(str(name), str(name))


def _numbers(text: str | float) -> list[float]:
    """The numbers of a cell with a list."""
    return [float(part) for part in str(text).split(";")]
