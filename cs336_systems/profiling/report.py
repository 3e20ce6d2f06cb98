"""Markdown for results: numbers, tables, and the environment of a measurement."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from .environment import Environment

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
