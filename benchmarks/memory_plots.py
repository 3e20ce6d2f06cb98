"""Plots of the benchmark of memory: peak against context, what the peak is made of, and the cost of checkpointing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory_cell import DTYPES, MODES
from benchmarks.memory_report import checkpointed, fine, name_of
from cs336_systems.profiling.categories import CATEGORIES
from cs336_systems.profiling.memory import GIB, MIB
from cs336_systems.profiling.plots import Axes, Panel, save_figure, save_panels, series_of
from cs336_systems.profiling.sweep import Row
from cs336_systems.profiling.timeline import COLOURS, OTHER_COLOUR

PEAKS, CATEGORIES_OF_PEAK, CHECKPOINTING = "peak.png", "categories.png", "checkpointing.png"
_INK = "#1a1a1a"


def draw(folder: Path, rows: Sequence[Row]) -> bool:
    """Draw what there is; True when matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    draw_peaks(folder / PEAKS, rows)
    draw_categories(folder / CATEGORIES_OF_PEAK, rows)
    draw_checkpointing(folder / CHECKPOINTING, rows)
    return True


def draw_peaks(path: Path, rows: Sequence[Row]) -> bool:
    """Peak against context: a panel for each preset and attention, a line for each mode and dtype."""
    plain = [row for row in fine(rows) if row["every"] is None]
    labels = {f"{mode}, {dtype}": group for mode in MODES for group, dtype in enumerate(DTYPES)}
    panels = []
    for preset, model in dict.fromkeys((row["preset"], row["model"]) for row in plain):
        mine = [row for row in plain if (row["preset"], row["model"]) == (preset, model)]
        points = ((f"{row['mode']}, {row['dtype']}", row["context"], row["peak_bytes"] / GIB) for row in mine)
        panels.append(Panel(f"{preset}, {model}", series_of(points, labels)))
    axes = Axes("context length", "peak, GiB allocated")
    return save_panels(path, panels, title="Peak memory", axes=axes, labels=labels)


def draw_categories(path: Path, rows: Sequence[Row]) -> bool:
    """A bar for each row: what was allocated at the peak of its recording, by category."""
    shown = fine(rows)
    if not shown:
        return False
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.32 * len(shown) + 1.2), layout="constrained")
    try:
        left = [0.0] * len(shown)
        for category in CATEGORIES:
            widths = [row["at_peak"].get(category, 0) / GIB for row in shown]
            if any(widths):
                axes.barh(
                    range(len(shown)), widths, left=left, color=COLOURS.get(category, OTHER_COLOUR), label=category
                )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(shown)), [name_of(row) for row in shown], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("GiB allocated at the recorded peak")
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        save_figure(figure, path)
    finally:
        plt.close(figure)
    return True


def draw_checkpointing(path: Path, rows: Sequence[Row]) -> bool:
    """Peak and time of a step against the blocks recomputed together, with the formula's peak and its best size."""
    groups = checkpointed(rows)
    if not groups:
        return False
    plt = _pyplot()
    figure, grid = plt.subplots(
        2, len(groups), figsize=(max(5.0, 3.6 * len(groups)), 6.4), squeeze=False, layout="constrained"
    )
    try:
        for column, (name, same) in enumerate(groups.items()):
            _draw_group(grid[0][column], grid[1][column], name, same)
        grid[0][0].set_ylabel("peak, MiB allocated")
        grid[1][0].set_ylabel("step, ms")
        save_figure(figure, path)
    finally:
        plt.close(figure)
    return True


def _draw_group(above: Any, below: Any, name: str, same: Sequence[Row]) -> None:
    recomputed = [row for row in same if row["every"]]
    sizes = [row["every"] for row in recomputed]
    above.plot(sizes, [row["peak_bytes"] / MIB for row in recomputed], "o-", color="#0060a8", label="measured")
    above.plot(sizes, [row["estimate_bytes"] / MIB for row in recomputed], "^--", color="#c44e00", label="formula")
    below.plot(sizes, [row["median_ms"] for row in recomputed], "o-", color="#0060a8", label="measured")
    for row in same:
        if row["every"] is None:
            above.axhline(row["peak_bytes"] / MIB, color=_INK, linewidth=0.9, label="nothing recomputed")
            below.axhline(row["median_ms"], color=_INK, linewidth=0.9, label="nothing recomputed")
    for axes in (above, below):
        axes.axvline(same[0]["best_every"], color=_INK, linestyle=":", label="least by the formula")
        axes.set_xticks(sizes)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_xlabel("blocks recomputed together")
        axes.legend(frameon=False, fontsize=7)
    above.set_title(name, fontsize=8)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
