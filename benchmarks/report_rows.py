"""Rows of results.csv that are asked something: those that have the figures, in pairs and series.

What they cannot answer is a `NotMeasuredError`, whose message says why.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from cs336_systems.profiling.report import format_number
from cs336_systems.profiling.sweep import Status

Line = Mapping[str, str]
Rows = Sequence[Line]


class NotMeasuredError(Exception):
    """The rows cannot answer; the message says why."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a results.csv as text; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def fine(rows: Rows, *columns: str) -> list[Line]:
    """The rows with status ok and a value in each column. Raises NotMeasuredError when there are none."""
    if not rows:
        raise NotMeasuredError("there are no rows")
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise NotMeasuredError(f"the rows have no column {', '.join(missing)}")
    found = [row for row in rows if row.get("status") == Status.OK.value and all(map(row.get, columns))]
    if not found:
        raise NotMeasuredError(f"no row has a figure for {', '.join(columns)}")
    return found


def pairs(rows: Iterable[Line], axis: str, first: str, second: str, but: Sequence[str]) -> list[tuple[Line, Line]]:
    """Rows that have these two values of one column, and the same in the columns ``but``. NotMeasuredError for none."""
    groups: dict[tuple[str, ...], dict[str, Line]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in but), {})[row[axis]] = row
    found = [(group[first], group[second]) for group in groups.values() if first in group and second in group]
    if not found:
        raise NotMeasuredError(f"no two rows differ in {axis} alone, {first} and {second}")
    return found


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The least and the most of some numbers; one of them where they read the same."""
    least, most = (format_number(pick(values), digits) for pick in (min, max))
    return least if least == most else f"{least} to {most}"


def of(row: Line, column: str) -> float:
    """The number in a column that has one."""
    return float(row[column])


def column_of(rows: Rows, *names: str) -> str:
    """The first of the names that is a column with a figure. Raises NotMeasuredError when none is."""
    for name in names:
        if any(row.get("status") == Status.OK.value and row.get(name) for row in rows):
            return name
    there = [name for name in names if rows and name in rows[0]]
    if rows and not there:
        raise NotMeasuredError(f"the rows have no column {' or '.join(names)}")
    raise NotMeasuredError(f"no row has a figure for {' or '.join(there)}" if rows else "there are no rows")


def grouped(rows: Iterable[Line], names: Sequence[str]) -> list[list[Line]]:
    """Rows that have the same in these columns, together."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in names), []).append(row)
    return [*groups.values()]


def spreads(rows: Iterable[Line], name: str, value: Callable[[Line], float]) -> list[tuple[str, str]]:
    """What a column has, each with the spread of a value of the rows that have it."""
    return [(group[0][name], spread([*map(value, group)])) for group in grouped(rows, [name])]


def powers_of(series: Iterable[Sequence[Line]], x: str, y: str) -> list[tuple[Sequence[Line], float]]:
    """By which power of x y grows between the two largest x, for each series that has two."""
    found = []
    for rows in series:
        points = sorted({of(row, x): of(row, y) for row in rows if of(row, y) > 0}.items())[-2:]
        if len(points) == 2:
            (x0, y0), (x1, y1) = points
            found.append((rows, math.log(y1 / y0) / math.log(x1 / x0)))
    if not found:
        raise NotMeasuredError(f"no series has two values of {x}")
    return found
