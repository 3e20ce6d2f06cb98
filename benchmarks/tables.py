"""Tables in Markdown and line plots, from the rows of a benchmark as a pandas DataFrame."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.results import Row, Status
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.plots import COLOURS, STYLE, save_figure, short_count
from cs336_systems.profiling.report import ABSENT, collected, environment_lines, format_number, markdown_table

_MARKERS = "os^DvPX*<>hp"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
_MOST_PANELS_IN_A_ROW = 4


def number(value: Any) -> str:
    """A cell of a table: three significant digits of a float, a dash for None and NaN, anything else as text."""
    if value is None or (isinstance(value, float) and value != value):
        return ABSENT
    return format_number(value) if isinstance(value, float) else str(value)


def markdown(frame: pd.DataFrame) -> str:
    """A DataFrame as a Markdown table, without its index."""
    lines = frame.to_numpy(object)
    return markdown_table([str(name) for name in frame.columns], [[number(cell) for cell in line] for line in lines])


def matrix(frame: pd.DataFrame, index: Sequence[str], columns: str, value: str) -> str:
    """A Markdown table with a line for each ``index`` and a column for each value of ``columns``.

    A cell is ``value``, or the row's status where there is no value and the status is not `ok`. Lines and columns come
    in the order of the rows; of several rows for one cell, the last counts.
    """
    names = list(dict.fromkeys(frame[columns]))
    cells: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in frame.to_dict("records"):
        text = number(row[value])
        if text == ABSENT and row["status"] != Status.OK.value:
            text = row["status"]
        cells.setdefault(tuple(row[name] for name in index), {})[row[columns]] = text
    lines = [[*map(str, key), *(line.get(name, ABSENT) for name in names)] for key, line in cells.items()]
    titles = [name if isinstance(name, str) else f"{columns} {name}" for name in names]
    return markdown_table([*index, *titles], lines)


def page(title: str, environment: Environment, notes: Sequence[str], tables: str, frame: pd.DataFrame) -> str:
    """The text of tables.md: environment, how it was measured, the tables, warnings, and rows without a figure.

    ``frame`` has the columns `case`, `status` and `reason`, and may have `provider`, `warning` and `commit`.
    """
    parts = [f"# {title}", "\n".join(environment_lines(environment)), bullets(notes)]
    commits = list(dict.fromkeys(frame["commit"].dropna())) if "commit" in frame else []
    if len(commits) > 1:
        parts.append(f"The rows were measured at several commits: {', '.join(commits)}.")
    parts.append(tables)
    rows = frame.to_dict("records")
    warnings = [f"{_subject(row)}: {row['warning']}" for row in rows if _text(row.get("warning"))]
    reasons = [f"{_subject(row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != Status.OK.value]
    for name, texts in (("Warnings", warnings), ("Without a figure", reasons)):
        if texts:
            parts.append(f"## {name}\n\n{bullets(collected(texts))}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _subject(row: dict[Any, Any]) -> str:
    return _text(row.get("provider")) or _text(row.get("case"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def bullets(texts: Sequence[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {text}" for text in texts)


def summary(rows: Sequence[Row]) -> str:
    """`2.31 ms` for one row, the number of each status for several, or the reason why a row has no figure."""
    if len(rows) > 1:
        statuses = [row["status"] for row in rows]
        return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    row = rows[0]
    if row["status"] != Status.OK.value:
        return f"{row['status']}: {row['reason'][:120]}"
    median = row.get("median_ms")
    return "ok" if median is None else f"{number(median)} ms"


def line_style(index: int, group: int = 0) -> dict[str, Any]:
    """Colour, marker and dashes of the line with this number, so that lines differ by more than their colour."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[group % len(_DASHES)],
    }


def plot_lines(
    path: Path,
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    line: str,
    panel: str | None = None,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    log_y: bool = True,
) -> Path | None:
    """Plot column ``y`` against column ``x``, whose scale doubles, with a line for each value of column ``line``.

    With ``panel`` there is a pair of axes for each value of that column. Writes a PNG file and returns its path, or
    None if no row has a value of ``y``. Needs matplotlib.
    """
    frame = frame.dropna(subset=[y])
    if frame.empty:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    names, panels = list(dict.fromkeys(frame[line])), list(dict.fromkeys(frame[panel])) if panel else [None]
    columns = min(_MOST_PANELS_IN_A_ROW, len(panels))
    height = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        size = (max(5.6, 3.5 * columns), 3.3 * height + 1.3)
        figure, grid = plt.subplots(height, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
        for axes, shown in itertools.zip_longest(grid.flat, panels):
            chosen = frame if panel is None else frame[frame[panel] == shown]
            axes.set_visible(not chosen.empty)
            for name, rows in chosen.groupby(line, sort=False):
                rows = rows.sort_values(x)
                axes.plot(rows[x], rows[y], label=str(name), **line_style(names.index(name)))
            axes.set(title="" if panel is None else f"{panel} {shown}", xlabel=x_label or x)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
            axes.set_yscale("log" if log_y else "linear")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.grid(True, linewidth=0.5)
        if not log_y:
            grid[0][0].set_ylim(bottom=0)
        grid[0][0].set_ylabel(y_label or y)
        labels = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title, fontsize=11, fontweight="bold")
        save_figure(figure, path)
        plt.close(figure)
    return path


def plot_bars(path: Path, frame: pd.DataFrame, *, title: str, label: str) -> Path | None:
    """Plot a horizontal bar for each row, stacked of the columns that are not all 0.

    Writes a PNG file and returns its path, or None if there is nothing to plot. Needs matplotlib.
    """
    frame = frame.loc[:, frame.fillna(0).any()]
    if frame.empty:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = [*COLOURS, *reversed(COLOURS)][: len(frame.columns)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 2.4 + 0.25 * len(frame)), layout="constrained")
        frame[::-1].plot.barh(stacked=True, ax=axes, color=colours, legend=False, xlabel=label, ylabel="", title=title)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        save_figure(figure, path)
        plt.close(figure)
    return path
