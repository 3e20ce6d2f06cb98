"""Line plots as PNG files that read well on paper, in grey, and as a light card on a dark page.

Every line has a colour, a marker and a dash pattern of its own, so that no two are told apart by colour alone.
Needs matplotlib, which is imported when a plot is drawn.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

# Dark enough for thin lines on white. Those that resemble one another in hue differ in lightness, and stand far apart.
COLOURS = (
    *("#6b6b6b", "#8a6d00", "#5c8a00", "#0060a8", "#2b93c4", "#c44e00"),
    *("#00805e", "#a8326e", "#7a3b1e", "#5b3fa8", "#111111", "#a877c4"),
)
INK = "#1a1a1a"
STYLE: Any = {
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "#ffffff"),
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
}
"""matplotlib's settings for every figure."""


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
