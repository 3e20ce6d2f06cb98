"""Stacked bars as PNG files, in the style of `plots`: what wholes are made of, one below another.

Every part has a colour and a hatching, so that neighbours are not told apart by colour alone. Needs matplotlib, which
is imported when a plot is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cs336_systems.profiling.plots import COLOURS, INK, STYLE, save_figure

_HATCHES = ("", "///", "...", "xx")
_LEAST_WRITTEN = 0.06
_INCHES_A_BAR = 0.32


def save_stacked_bars(
    path: Path,
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    parts: Sequence[str],
    label: str,
    shares: bool = True,
) -> bool:
    """Draw a horizontal bar for each name, stacked of its parts; True when there was anything to draw.

    `parts` has every part that can occur, in their order from the left: a part looks the same in all figures that are
    drawn with the same parts. Parts that no bar has are not in the legend. `label` is that of the axis, which goes from
    0 to 1 where the parts are `shares`, written in them as percentages, and from 0 to the longest bar where not.

    Raises ValueError when a bar has a part that is not among them.
    """
    for name, lengths in bars.items():
        unknown = [part for part in lengths if part not in parts]
        if unknown:
            raise ValueError(f"bars must have parts of {', '.join(parts)}; got {', '.join(unknown)} in {name}")
    if not bars:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.0, 1.6 + _INCHES_A_BAR * len(bars)), layout="constrained")
        try:
            _stack(axes, bars, parts, shares)
            # Space for half a bar above the first and below the last, where matplotlib has a share of them all.
            axes.set_ylim(len(bars) - 0.25, -0.75)
            if shares:
                axes.set_xlim(0, 1)
            axes.set_xlabel(label)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            figure.legend(loc="outside lower center", ncols=4, frameon=False)
            figure.suptitle(title, fontsize=11, fontweight="bold")
            save_figure(figure, path)
        finally:
            plt.close(figure)
    return True


def _stack(axes: Any, bars: Mapping[str, Mapping[str, float]], parts: Sequence[str], shares: bool) -> None:
    from matplotlib.patheffects import withStroke

    names = list(bars)
    left = [0.0] * len(names)
    for index, part in enumerate(parts):
        widths = [bars[name].get(part, 0.0) for name in names]
        if not any(widths):
            continue
        drawn = axes.barh(
            names,
            widths,
            left=left,
            label=part,
            color=COLOURS[index % len(COLOURS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.6,
        )
        if shares:
            written = [f"{100 * width:.0f} %" if width >= _LEAST_WRITTEN else "" for width in widths]
            # An outline keeps figures apart from the hatching.
            for text in axes.bar_label(drawn, written, label_type="center", color="white", fontsize=8):
                text.set_path_effects([withStroke(linewidth=2.5, foreground=INK)])
        left = [start + width for start, width in zip(left, widths, strict=True)]
