"""Tables in Markdown and line plots, from the rows of a benchmark as a pandas DataFrame."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.lib.intervals import LEGEND, figures_with_intervals, marks
from benchmarks.lib.results import Row, Status
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.report import ABSENT, format_number, markdown_table

# Dark enough for thin lines on white. Those that resemble one another in hue differ in lightness, and stand far apart.
COLOURS = (
    *("#6b6b6b", "#8a6d00", "#5c8a00", "#0060a8", "#2b93c4", "#c44e00"),
    *("#00805e", "#a8326e", "#7a3b1e", "#5b3fa8", "#111111", "#a877c4"),
)
_INK = "#1a1a1a"
_STYLE: Any = {
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "#ffffff"),
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
}
"""matplotlib's settings for every figure, which read well on paper, in grey, and as a light card on a dark page."""
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


def with_columns(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The frame with these columns too, which have no values if it lacks them."""
    return frame.reindex(columns=list(dict.fromkeys([*frame.columns, *names])))


def figures(frame: pd.DataFrame, column: str) -> pd.Series[str]:
    """A cell for each row: its figure, or its status where it has no figure and the status is not `ok`.

    A figure has its interval if there is one, and the row's `marks` if it is a time or made of times.
    """
    failed = frame[column].isna() & (frame["status"] != Status.OK.value)
    cells = frame[column].map(number).astype(object)
    if f"{column}_low" in frame:
        cells = figures_with_intervals(frame, column)
    if column.endswith(("median_ms", "tflops")) or f"{column}_low" in frame:
        cells += marks(frame).mask(frame[column].isna(), "")
    return cells.mask(failed, frame["status"])


def with_time(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with ``time``, the median in milliseconds, whose interval `figures` and `matrix` print with it."""
    return frame.assign(time=frame["median_ms"], time_low=frame["low_ms"], time_high=frame["high_ms"])


def matrix(frame: pd.DataFrame, index: Sequence[str], columns: str, value: str) -> str:
    """A Markdown table with a line for each ``index`` and a column for each value of ``columns``.

    Cells are those of `figures`. Lines and columns come in the order of the rows; of several rows for one cell, the
    last counts.
    """
    rows = frame.assign(cell=figures(frame, value))
    cells = rows.drop_duplicates([*index, columns], keep="last").set_index([*index, columns])["cell"]
    titles = {name: name if isinstance(name, str) else f"{columns} {name}" for name in rows[columns]}
    lines = cells.unstack(sort=False).fillna(ABSENT).rename(columns=titles)
    return markdown(lines.reset_index())


def lines(frame: pd.DataFrame, index: Sequence[str], columns: Mapping[str, tuple[str, str]]) -> str:
    """A table with a line for each ``index``; ``columns`` have for each title a query of the rows, and a column.

    Columns without a cell are left out. Of several rows for one cell, the last counts.
    """
    cells = {}
    # Whole numbers became floats where rows of other programs lack the column.
    frame = frame.dropna(subset=[*index])
    frame = frame.astype({name: int for name in index if pd.api.types.is_float_dtype(frame[name])})
    for title, (query, column) in columns.items():
        rows = with_columns(frame, [column]).query(query).drop_duplicates([*index], keep="last")
        found = figures(rows, column).set_axis(pd.MultiIndex.from_frame(rows[[*index]]))
        if (found != ABSENT).any():
            cells[title] = found
    order = pd.MultiIndex.from_frame(frame[[*index]].drop_duplicates())
    table = pd.DataFrame(cells, order.unique()).dropna(how="all").fillna(ABSENT)
    return markdown(table.reset_index()) if cells else ""


def page(title: str, environment: Environment, notes: Sequence[str], tables: str, frame: pd.DataFrame) -> str:
    """The text of tables.md: environment, how it was measured, the tables, warnings, and rows without a figure.

    ``frame`` has the columns `case`, `status` and `reason`, and may have `provider`, `warning` and `commit`.
    """
    parts = [f"# {title}", "\n".join(environment_lines(environment)), bullets(notes)]
    commits = list(dict.fromkeys(frame["commit"].dropna())) if "commit" in frame else []
    if len(commits) > 1:
        parts.append(f"The rows were measured at several commits: {', '.join(commits)}.")
    parts += [tables, bullets([f"{sign} {text}" for sign, text in LEGEND.items() if sign in tables])]
    rows = frame.to_dict("records")
    warnings = [f"{_subject(row)}: {row['warning']}" for row in rows if _text(row.get("warning"))]
    reasons = [f"{_subject(row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != Status.OK.value]
    for name, texts in (("Warnings", warnings), ("Without a figure", reasons)):
        if texts:
            parts.append(f"## {name}\n\n{bullets(collected(texts))}")
    return "\n\n".join(part for part in parts if part) + "\n"


def environment_lines(environment: Environment) -> list[str]:
    """The environment as items of a Markdown list."""
    on_cpu = environment.device_type == "cpu"
    commit, changes = environment.commit, " with uncommitted changes" if environment.dirty else ""
    facts: dict[str, str | None] = {
        "device": environment.device,
        "torch": environment.torch,
        "triton": environment.triton,
        "CUDA": environment.cuda,
        "cuDNN": environment.cudnn,
        "driver": environment.driver,
        "Python": environment.python,
        "CPU threads": str(environment.cpu_threads) if on_cpu else None,
        "load average": format_number(environment.load_average) if on_cpu else None,
        "commit": commit + changes if commit else "unknown",
        "date": environment.date,
        "command": f"`{environment.command}`",
        **environment.packages,
    }
    return [f"- {name}: {fact}" for name, fact in facts.items() if fact is not None]


def collected(texts: Iterable[str]) -> list[str]:
    """The first of the texts that differ only in numbers, with their count if above 1."""
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for text in texts:
        pattern = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
        first.setdefault(pattern, text)
        counts[pattern] += 1
    return [text if counts[pattern] == 1 else f"{text} ({counts[pattern]} times)" for pattern, text in first.items()]


def _subject(row: dict[Any, Any]) -> str:
    return _text(row.get("provider")) or _text(row.get("case"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def sections(parts: Mapping[str, str]) -> str:
    """Markdown: the parts that have a text, each with its title."""
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items() if text)


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


@contextlib.contextmanager
def new_figure(path: Path, **layout: Any) -> Iterator[tuple[Any, Any]]:
    """The figure and axes of ``matplotlib.pyplot.subplots(**layout)``, saved as a PNG file after the block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(layout="constrained", **layout)
        yield figure, axes
        save_figure(figure, path)
        plt.close(figure)


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG with a palette of 256 colours: a quarter of the bytes, and no eye tells."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=160)
    image = Image.open(drawn).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)


def short_count(value: float) -> str:
    """A length as a tick: 512, 4k for 4096, 1M for 1048576; written out where it is not a whole number of them."""
    for unit, suffix in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{int(value // unit)}{suffix}"
    return f"{value:g}"


def plot_lines(
    path: Path,
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    line: str,
    panel: str,
    title: str = "",
    y_label: str = "",
    log_y: bool = True,
    x_base: int = 2,
) -> None:
    """Plot column ``y`` against column ``x``, with a line for each value of column ``line``.

    The scale of ``x`` has ticks at powers of ``x_base``. There is a pair of axes for each value of column ``panel``.
    Writes a PNG file, unless no row has a value of ``y``.
    Needs matplotlib.
    """
    frame = frame.dropna(subset=[y])
    if frame.empty:
        return
    names, panels = list(dict.fromkeys(frame[line])), list(dict.fromkeys(frame[panel]))
    columns = min(_MOST_PANELS_IN_A_ROW, len(panels))
    height = -(-len(panels) // columns)
    size = (max(5.6, 3.5 * columns), 3.3 * height + 1.3)
    with new_figure(path, nrows=height, ncols=columns, figsize=size, sharey=True, squeeze=False) as (figure, grid):
        for axes, shown in itertools.zip_longest(grid.flat, panels):
            axes.set_visible(shown is not None)
            for number_of_line, name in enumerate(names):
                rows = frame[(frame[panel] == shown) & (frame[line] == name)].sort_values(x)
                axes.plot(rows[x], rows[y], label=str(name), **line_style(number_of_line))
            axes.set(title=f"{panel} {shown}", xlabel=x, yscale="log" if log_y else "linear")
            axes.set_xscale("log", base=x_base)
            axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
            axes.grid(True, linewidth=0.5)
        if not log_y:
            grid[0][0].set_ylim(bottom=0)
        grid[0][0].set_ylabel(y_label or y)
        lines = grid[0][0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(title, fontsize=11, fontweight="bold")


def plot_bars(path: Path, frame: pd.DataFrame, *, title: str, label: str) -> None:
    """Plot a bar for each row, stacked of the columns that are not all 0, into a PNG file, if there are any."""
    frame = frame.loc[:, frame.fillna(0).any()]
    if frame.empty:
        return
    colours = [*COLOURS, *reversed(COLOURS)][: len(frame.columns)]
    with new_figure(path, figsize=(10, 2.4 + 0.25 * len(frame))) as (figure, axes):
        frame[::-1].plot.barh(stacked=True, ax=axes, color=colours, legend=False, xlabel=label, ylabel="", title=title)
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
