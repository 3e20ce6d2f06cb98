"""Markdown for results: numbers that can be read, tables, and the environment they were measured in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from cs336_systems.profiling.environment import Environment

ABSENT = "–"


def format_number(value: float | int | None, digits: int = 3) -> str:
    """A number with `digits` significant digits and no exponent; a dash for None and for what is not finite.

    Digits before the decimal point are never rounded away: 12345.6 is `12346` for any number of digits below five.
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, decimals)}f}"


def markdown_table(headers: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text: the first one to the left, the others to the right.

    Raises ValueError when a line has another number of cells than there are headers.
    """
    escaped = [[_escape(cell) for cell in line] for line in lines]
    for line in escaped:
        if len(line) != len(headers):
            raise ValueError(f"lines must have {len(headers)} cells like the headers; got {len(line)}: {line}")
    titles = [_escape(header) for header in headers]
    widths = [max([3, len(title), *(len(line[i]) for line in escaped)]) for i, title in enumerate(titles)]

    def aligned(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        padded[0] = cells[0].ljust(widths[0])
        return "| " + " | ".join(padded) + " |"

    rules = ["-" * (width + 1) + ":" for width in widths]
    rules[0] = ":" + "-" * (widths[0] + 1)
    return "\n".join([aligned(titles), "|" + "|".join(rules) + "|", *(aligned(line) for line in escaped)])


def _escape(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())


def environment_lines(environment: Environment) -> list[str]:
    """The environment as Markdown list items: device, versions, commit, date and command."""
    facts: Mapping[str, str | None] = {
        "device": environment.device,
        "torch": environment.torch,
        "triton": environment.triton,
        "CUDA": environment.cuda,
        "cuDNN": environment.cudnn,
        "driver": environment.driver,
        "Python": environment.python,
        "CPU threads": str(environment.cpu_threads) if environment.device_type == "cpu" else None,
        "load average": format_number(environment.load_average) if environment.device_type == "cpu" else None,
        "commit": _commit(environment),
        "date": environment.date,
        "command": f"`{environment.command}`",
        **environment.packages,
    }
    return [f"- {name}: {fact}" for name, fact in facts.items() if fact is not None]


def report_page(
    title: str,
    environment: Environment,
    method: Sequence[str],
    parts: Sequence[str],
    *,
    warned: Sequence[str] = (),
    reasons: Sequence[str] = (),
) -> str:
    """A page of Markdown: the environment, how it was measured, the parts, warnings, and why some rows have no figure.

    ``method``, ``warned`` and ``reasons`` are sentences; what is empty is left out.
    """
    page = [f"# {title}", "\n".join(environment_lines(environment)), _bullets(method), *parts]
    closing = (("Warnings", warned), ("Without a figure", reasons))
    page += [f"## {name}\n\n{_bullets(texts)}" for name, texts in closing if texts]
    return "\n\n".join(part for part in page if part) + "\n"


def several_commits(rows: Iterable[Mapping[str, object]]) -> str:
    """A sentence that names the commits of rows that were measured at more than one; else an empty one."""
    commits = dict.fromkeys(str(row.get("commit") or "unknown") for row in rows)
    return f"The rows were measured at several commits: {', '.join(commits)}." if len(commits) > 1 else ""


def _bullets(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def collected(texts: Iterable[str]) -> list[str]:
    """Texts with each kind said once: those that differ in their numbers alone are one, with the first's numbers.

    A text that stands for more than itself ends in how many there were.
    """
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for text in texts:
        kind = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
        first.setdefault(kind, text)
        counts[kind] = counts.get(kind, 0) + 1
    return [text if counts[kind] == 1 else f"{text} ({counts[kind]} times)" for kind, text in first.items()]


def _commit(environment: Environment) -> str:
    if environment.commit is None:
        return "unknown"
    return environment.commit + (" with uncommitted changes" if environment.dirty else "")
