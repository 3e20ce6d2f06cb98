"""Stacked bars as PNG files: what a whole is made of, one bar below another, in the style of `plots`.

Needs matplotlib, which is imported when bars are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cs336_systems.profiling.plots import COLOURS, GRID, STYLE

_HATCHES = ("", "//", "..", "xx", "\\\\")
_INCHES_A_BAR = 0.32


@dataclass(frozen=True)
class Bar:
    """One bar: its label, and a length for each part, 0 where it has none."""

    label: str
    lengths: tuple[float, ...]


def save_bars(path: Path, bars: Sequence[Bar], *, title: str, x_label: str, parts: Sequence[str]) -> bool:
    """Draw stacked bars into a PNG file, with a legend of their parts; True when there was anything to draw.

    Parts differ in hatching as well as in colour. A figure's bars share one axis, which begins at 0.

    Raises:
        ValueError: a bar has another number of lengths than there are parts.
    """
    for bar in bars:
        if len(bar.lengths) != len(parts):
            raise ValueError(f"lengths must have one for each of {len(parts)} parts; got {len(bar.lengths)}")
    if not bars:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [bar.label for bar in bars]
    with plt.rc_context(STYLE):
        figure, place = plt.subplots(figsize=(9.0, 1.6 + _INCHES_A_BAR * len(bars)), layout="constrained")
        try:
            begins = [0.0] * len(bars)
            for index, part in enumerate(parts):
                lengths = [bar.lengths[index] for bar in bars]
                place.barh(
                    range(len(bars)),
                    lengths,
                    left=begins,
                    label=part,
                    color=COLOURS[(3 + 2 * index) % len(COLOURS)],
                    hatch=_HATCHES[index % len(_HATCHES)],
                    edgecolor="white",
                    linewidth=0.5,
                )
                begins = [begin + length for begin, length in zip(begins, lengths, strict=True)]
            place.set_yticks(range(len(bars)), labels)
            place.invert_yaxis()
            place.set_xlabel(x_label)
            place.grid(True, axis="x", color=GRID, linewidth=0.6)
            place.set_axisbelow(True)
            for side in ("top", "right"):
                place.spines[side].set_visible(False)
            figure.legend(loc="outside lower center", ncols=len(parts), frameon=False)
            figure.suptitle(title, fontsize=11, fontweight="bold")
            figure.savefig(path, dpi=160)
        finally:
            plt.close(figure)
    return True
