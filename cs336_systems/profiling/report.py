"""Numbers and tables as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ABSENT = "–"


def format_number(value: float | int | None, digits: int = 3) -> str:
    """``value`` with at least ``digits`` significant digits and no exponent; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def markdown_table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right.

    Raises ValueError if a line has not as many cells as there are headers.
    """
    rows = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in (headers, *lines)]
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"lines must have {len(headers)} cells like the headers; got {len(row)}: {row}")
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    texts = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        texts.append(f"| {' | '.join(cells)} |")
    rules = [":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]
    return "\n".join([texts[0], f"|{'|'.join(rules)}|", *texts[1:]])
