"""How sure figures are: marks of cells, ratios with their intervals, and the rows of several visits taken together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from benchmarks.lib.results import Status
from cs336_systems.profiling.report import ABSENT, format_number
from cs336_systems.profiling.timing import PRECISION

HOST_BOUND, IMPRECISE = "†", "‡"
LEGEND = {
    HOST_BOUND: "the device waits for the host, so this is the time of the host",
    IMPRECISE: f"the 95 % confidence interval of the median goes beyond ±{PRECISION:.0%} of it",
}
_COMBINED: dict[str, Callable[[list[float]], float]] = {"low": min, "min": min, "high": max, "max": max}


def marks(frame: pd.DataFrame) -> pd.Series[str]:
    """For each row, the signs of `LEGEND` that its time has."""
    host_bound, precise = (frame.get(name, pd.Series(index=frame.index)) for name in ("host_bound", "precise"))
    signs = [
        HOST_BOUND * (waits is True or waits == 1.0) + IMPRECISE * (sure is False or sure == 0.0)
        for waits, sure in zip(host_bound, precise, strict=True)
    ]
    return pd.Series(signs, frame.index, dtype=object)


def with_interval(value: Any, low: Any, high: Any) -> str:
    """`1.23 (1.20 to 1.26)`, the value alone without an interval, or a dash without a value."""
    if pd.isna(value):
        return ABSENT
    text = format_number(float(value))
    if pd.isna(low) or pd.isna(high) or low == high:
        return text
    return f"{text} ({format_number(float(low))} to {format_number(float(high))})"


def figures_with_intervals(frame: pd.DataFrame, column: str) -> pd.Series[str]:
    """For each row, the figure of a column that has an interval, in the columns with `_low` and `_high`."""
    ends = zip(*(frame[f"{column}{end}"] for end in ("", "_low", "_high")), strict=True)
    return pd.Series([with_interval(*each) for each in ends], frame.index, dtype=object)


def quotient(
    above: Mapping[str, Any], below: Mapping[str, Any], column: str, column_below: str | None = None
) -> tuple[float, float, float] | None:
    """A row's figure over that of another row, or in another column; and its interval. None if one is missing.

    The two were not measured in the same rounds, so the interval is the widest that those of both medians allow. A
    figure that is not a time has no interval.
    """
    values = []
    for row, name in ((above, column), (below, column_below or column)):
        ends = [name.replace("median_ms", f"{end}_ms") for end in ("median", "low", "high")]
        values.append([row.get(end, row.get(name)) for end in ends])
    (median, low, high), (other, other_low, other_high) = values
    if any(map(pd.isna, (median, low, high, other, other_low, other_high))) or not min(other, other_low):
        return None
    return median / other, low / other_high, high / other_low


def pooled(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for all visits of a case, with the median of each figure and the widest of its intervals.

    A visit that failed is the row of its case.
    """
    if "visit" not in frame or frame["visit"].nunique() < 2:
        return frame
    order = frame.groupby(["case", "visit"], sort=False).cumcount()
    together = [_together(rows) for _, rows in frame.groupby(["case", order], sort=False)]
    return pd.DataFrame(together, columns=frame.columns)


def _together(rows: pd.DataFrame) -> dict[str, Any]:
    failed = rows[rows["status"] != Status.OK.value]
    if len(failed):
        return failed.iloc[0].to_dict()
    row: dict[str, Any] = {name: _combined(name, list(rows[name])) for name in rows}
    for name in filter(lambda name: name.endswith("precise"), row):
        median, low, high = (row.get(name.replace("precise", f"{end}_ms")) for end in ("median", "low", "high"))
        if median is not None and low is not None and high is not None:
            row[name] = max(median - low, high - median) <= PRECISION * median
    return row


def _combined(name: str, values: list[Any]) -> Any:
    """One value of a column for all visits."""
    lists = [value for value in values if isinstance(value, list)]
    if lists:
        return [item for each in lists for item in each]
    known = [value for value in values if not pd.isna(value)]
    if not known or isinstance(known[0], str):
        return known[0] if known else None
    if isinstance(known[0], bool):
        return any(known)
    words = name.removesuffix("_ms").removesuffix("_us").split("_")
    return known[0] if len(set(known)) == 1 else _COMBINED.get(words[-1], statistics.median)(known)
