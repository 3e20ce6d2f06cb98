"""Tables and plots of data_parallel.py."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from benchmarks.lib.harness import Status
from benchmarks.lib.tables import bullets, figures, markdown, matrix, plot_bars, sections, with_columns, with_time
from benchmarks.parts.data_parallel_modes import BUCKETED, NONE, STAGES
from benchmarks.parts.data_parallel_process import PHASES

WORK = ["model", "suite", "vocab_size", "batch", "length", "dtype", "warmup_steps"]
"""The columns that rows which are compared have in common."""
_SAME_LOSS = 0.02
_SIZES = [f"{stage}_{size}_mib" for stage in STAGES for size in ("peak", "held", "predicted")]
_FIGURES = ["median_ms", "low_ms", "high_ms", "share_communication", "tokens_per_second", "first_loss", "last_loss"]
_FIGURES += [f"{phase}_median_ms" for phase in PHASES] + [*_SIZES, "peak_mib", "collectives_ms", "share_hidden"]


def axes_of(frame: pd.DataFrame) -> list[str]:
    """The columns that identify a line: the model, its work, and what else has several values."""
    several = [name for name in WORK if name in ("model", "batch", "length", "dtype") or frame[name].nunique() > 1]
    return [*several, "processes", "parallel"]


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with all columns, and the bucket's size in the name of the mode."""
    frame = with_time(with_columns(frame, _FIGURES))
    names = [
        mode if pd.isna(size) else f"{mode} {size:g} MiB"
        for mode, size in zip(frame["parallel"], frame["bucket_mb"], strict=True)
    ]
    return frame.assign(mode=frame["parallel"], parallel=names)


def with_one_process(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``over_one_ms``, a step's time less that of one process with the work of one, and ``efficiency``,
    the time of one process over it."""
    one = frame[frame["mode"] == NONE].drop_duplicates(WORK)
    base = frame[WORK].merge(one[[*WORK, "median_ms"]], "left", WORK).set_index(frame.index)["median_ms"]
    over = (frame["median_ms"] - base).mask(frame["mode"] == NONE)
    return frame.assign(over_one_ms=over, efficiency=base / frame["median_ms"])


def wrong_losses(frame: pd.DataFrame) -> list[str]:
    """Warnings: as many processes have the same tokens and parameters, and so the same losses in every mode."""
    texts = []
    for work, rows in frame.groupby([*WORK, "processes"], sort=False):
        for name in ("first_loss", "last_loss"):
            known = rows.dropna(subset=[name])
            if len(known) < 2:
                continue
            low, high = (known.loc[index] for index in (known[name].idxmin(), known[name].idxmax()))
            if high[name] - low[name] > _SAME_LOSS * abs(low[name]):
                losses = " and ".join(f"{row[name]:.4f} with {row['parallel']}" for row in (low, high))
                texts.append(f"{' '.join(map(str, work))}: {name} is {losses}; one of them is wrong")
    return texts


def tables(frame: pd.DataFrame) -> str:
    """Times of steps and phases with the share of communication; sizes of buckets; memory by stage; warnings."""
    frame = with_one_process(complete(frame))
    axes = axes_of(frame)
    columns = {f"{phase}_median_ms": phase for phase in PHASES} | {"share_communication": "share of communication"}
    columns |= {"over_one_ms": "over one process", "efficiency": "efficiency"}
    if frame["collectives_ms"].notna().any():
        columns |= {"collectives_ms": "collectives", "share_hidden": "hidden"}
    steps = frame[axes].assign(step=figures(frame, "time")).join(frame[[*columns, "tokens_per_second", "status"]])
    buckets = frame[(frame["mode"] == BUCKETED) & (frame["status"] == Status.OK.value)]
    buckets = buckets.astype({"bucket_mb": int})
    return sections(
        {
            "Steps, ms": markdown(steps.rename(columns=columns)),
            "Sizes of buckets, ms": matrix(buckets, axes[:-1], "bucket_mb", "time") if len(buckets) else "",
            "Memory by stage, MiB": markdown(frame[[*axes, "parameters", *_SIZES, "peak_mib"]].rename(columns=_title)),
            "Losses": bullets(wrong_losses(frame)),
        }
    )


def _title(column: str) -> str:
    """`before step, held` for `before_step_held_mib`."""
    if column not in _SIZES:
        return column
    stage, size, _ = column.rsplit("_", 2)
    return f"{stage.replace('_', ' ')}, {size}"


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot the phases of a step, and memory at each stage, a bar for each row."""
    frame = complete(frame)
    frame = frame[frame["status"] == Status.OK.value]
    if frame.empty:
        return
    bars = frame.set_index("case")
    phases = bars[[f"{phase}_median_ms" for phase in PHASES]].fillna(0.0).set_axis([*PHASES], axis="columns")
    plot_bars(folder / "phases.png", phases, title="Phases of a step", label="ms")
    held = bars[[f"{stage}_held_mib" for stage in STAGES]].astype(float)
    parts = held.diff(axis="columns").fillna({held.columns[0]: held[held.columns[0]]})
    names = ["parameters", "gradients", "optimizer state"]
    plot_bars(folder / "memory.png", parts.set_axis(names, axis="columns"), title="Held after a step", label="MiB")
