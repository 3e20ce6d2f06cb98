"""Line plots as PNG files that read well on paper, in grey, and as a light card on a dark page.

Every line has a colour, a marker and a dash pattern of its own, so that no two are told apart by colour alone.
Needs matplotlib, which is imported when a plot is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Dark enough for thin lines on white. Those that resemble one another in hue differ in lightness, and stand far apart.
COLOURS = (
    *("#6b6b6b", "#8a6d00", "#5c8a00", "#0060a8", "#2b93c4", "#c44e00"),
    *("#00805e", "#a8326e", "#7a3b1e", "#5b3fa8", "#111111", "#a877c4"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
INK = "#1a1a1a"
_GRID = "#d4d4d4"
_PAPER = "#ffffff"
STYLE: Any = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": _PAPER,
    "figure.facecolor": _PAPER,
    "savefig.facecolor": _PAPER,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
}
"""matplotlib's settings for every figure."""
_LEGEND_ENTRY_INCHES = 1.4
_MARK_INCHES = 0.7
_CHARACTER_INCHES = 0.075
_LEAST_LOGARITHMIC_RANGE = 8.0
_MOST_MARKERS = 60
_ROOF_BEYOND = 1.4
_DOTS_PER_INCH = 160


@dataclass(frozen=True)
class Series:
    """One line of a plot: its label, and as many values of x as of y."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"y must have the {len(self.x)} values of x; got {len(self.y)}")


def series_of(points: Iterable[tuple[str, float, float]], labels: Iterable[str]) -> tuple[Series, ...]:
    """A line for each label, in their order, of the points (label, x, y) that have it, sorted by x."""
    lines: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
    for label, x, y in points:
        lines[label].append((x, y))
    ordered = ((label, sorted(line)) for label, line in lines.items())
    return tuple(Series(label, tuple(x for x, _ in line), tuple(y for _, y in line)) for label, line in ordered)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a title and its lines."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Roof:
    """What a device can reach, for figures of TFLOP/s by operations a byte: peak rates by name, and GB/s of memory."""

    peaks: Mapping[str, float]
    bandwidth: float

    def at(self, peak: float, x: float) -> float:
        """TFLOP/s under one of the peaks, where each byte is for `x` operations."""
        return min(peak, self.bandwidth * x / 1e3)


@dataclass(frozen=True)
class Axes:
    """What the panels of a figure share: axis labels, whether y is logarithmic, a level to mark, whether x doubles.

    A figure of rates may have a roof.
    """

    x_label: str
    y_label: str
    logarithmic: bool = True
    level: float | None = None
    doubling: bool = True
    roof: Roof | None = None


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as PNG with a palette of 256 colours: a quarter of the bytes, and no eye tells."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DOTS_PER_INCH)
    image = Image.open(drawn).convert("RGB")
    few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, format="PNG", optimize=True)


def save_panels(path: Path, panels: Sequence[Panel], *, title: str, axes: Axes, labels: Mapping[str, int]) -> bool:
    """Draw the panels side by side into a PNG file, with one legend; True when there was anything to draw.

    `labels` has every label that can occur, in the legend's order, with the number of its group: 0, 1 or 2. A label
    looks the same in all figures drawn with the same labels; a group's lines are solid, dashed or dotted.
    """
    drawn = [panel for panel in panels if any(series.x for series in panel.series)]
    if not drawn:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(4, len(drawn))
    rows = -(-len(drawn) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows,
            columns,
            figsize=(max(5.6, 3.5 * columns), 3.3 * rows + 1.3),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        try:
            for place, panel in zip(grid.flat, drawn, strict=False):
                _draw(place, panel, axes, labels)
            # The panels share this axis, and a limit set before all are drawn would hold for the later ones.
            peaks = axes.roof.peaks.values() if axes.roof else ()
            rates = [y for panel in drawn for series in panel.series for y in series.y]
            _scale_y(grid[0][0], [*rates, *peaks], axes.logarithmic)
            for place in list(grid.flat)[len(drawn) :]:
                place.set_visible(False)
            for line in grid:
                line[0].set_ylabel(axes.y_label)
            _legend(figure, grid, labels)
            figure.suptitle(title, fontsize=11, fontweight="bold")
            save_figure(figure, path)
        finally:
            plt.close(figure)
    return True


def _draw(place: Any, panel: Panel, axes: Axes, labels: Mapping[str, int]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    shown = [series for series in panel.series if series.x]
    for position, series in enumerate(shown):
        index = list(labels).index(series.label)
        # Of lines that coincide, each later one is thinner, so that those below it still show.
        thinning = 1 - position / max(1, len(shown) - 1)
        place.plot(
            series.x,
            series.y,
            label=series.label,
            color=COLOURS[index % len(COLOURS)],
            # Markers tell lines apart; on a line of many points they would hide it.
            marker=_MARKERS[index % len(_MARKERS)] if len(series.x) <= _MOST_MARKERS else None,
            linestyle=_DASHES[labels[series.label] % len(_DASHES)],
            markersize=4 + 1.5 * thinning,
            linewidth=1.4 + 0.7 * thinning,
        )
    if axes.level is not None:
        place.axhline(axes.level, color=INK, linewidth=0.8)
    if axes.roof is not None:
        _draw_roof(place, axes.roof, [x for series in shown for x in series.x])
    place.set_title(panel.title, fontsize=10)
    place.set_xlabel(axes.x_label)
    if axes.doubling:
        place.set_xscale("log", base=2)
        ticks = sorted({x for series in shown for x in series.x})
        place.xaxis.set_major_locator(FixedLocator(ticks))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_count(x)))
        place.tick_params(axis="x", labelrotation=45 if len(ticks) > 6 else 0)
    place.grid(True, which="major", color=_GRID, linewidth=0.6)
    place.set_axisbelow(True)
    for side in ("top", "right"):
        place.spines[side].set_visible(False)


def _draw_roof(place: Any, roof: Roof, values: Sequence[float]) -> None:
    first, last = min(values) / _ROOF_BEYOND, max(values) * _ROOF_BEYOND
    for name, peak in roof.peaks.items():
        ridge = 1e3 * peak / roof.bandwidth
        bends = sorted({first, last, min(max(ridge, first), last)})
        place.plot(bends, [roof.at(peak, x) for x in bends], color=INK, linewidth=1.0)
        place.annotate(f"{name}: {peak:g}", (bends[-2], roof.at(peak, bends[-2])), ha="left", va="bottom", fontsize=7)


def _scale_y(place: Any, values: Sequence[float], logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not logarithmic:
        place.set_ylim(bottom=0)
        return
    place.set_yscale("log")
    # Over few decades powers of ten alone would leave an axis with one number on it, or none.
    steps = (1.0, 2.0, 5.0) if max(values) <= 1000 * min(values) else (1.0,)
    if max(values) < _LEAST_LOGARITHMIC_RANGE * min(values):
        # Equal values would otherwise be drawn apart, on an axis of hundredths.
        middle = (max(values) * min(values)) ** 0.5
        place.set_ylim(middle / _LEAST_LOGARITHMIC_RANGE**0.5, middle * _LEAST_LOGARITHMIC_RANGE**0.5)
    place.yaxis.set_major_locator(LogLocator(subs=steps, numticks=99))
    place.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    place.yaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, grid: Any, labels: Mapping[str, int]) -> None:
    handles: dict[str, Any] = {}
    for place in grid.flat:
        for handle, label in zip(*place.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    ordered = [label for label in labels if label in handles]
    widest = max(_LEGEND_ENTRY_INCHES, _MARK_INCHES + _CHARACTER_INCHES * max(map(len, ordered)))
    most = max(1, int(figure.get_figwidth() // widest))
    lines = -(-len(ordered) // most)
    figure.legend(
        [handles[label] for label in ordered],
        ordered,
        loc="outside lower center",
        ncols=-(-len(ordered) // lines),
        frameon=False,
    )


def short_count(value: float) -> str:
    """A length as a tick: 512, 4k for 4096, 1M for 1048576; written out where it is not a whole number of them."""
    for unit, suffix in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{int(value // unit)}{suffix}"
    return f"{value:g}"
