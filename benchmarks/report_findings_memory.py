"""What the figures of memory say, in sentences made of the rows of results.csv: see `report_findings`."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.report_rows import (
    Line,
    NotMeasuredError,
    Rows,
    column_of,
    fine,
    grouped,
    of,
    pairs,
    powers_of,
    spread,
    spreads,
)

_SERIES = ("preset", "model", "batch", "context", "mode", "dtype", "every")


def _without(name: str) -> list[str]:
    return [other for other in _SERIES if other != name]


def _whole(rows: Iterable[Line]) -> list[Line]:
    """Those that recompute nothing. Raises NotMeasuredError when each does."""
    found = [row for row in rows if not row.get("every")]
    if not found:
        raise NotMeasuredError("every row recomputes blocks")
    return found


def peak_growth(rows: Rows) -> str:
    """How peak memory grows with the context, by mode, and what is held for the backward."""
    peak = column_of(rows, "peak_bytes", "recorded_peak_bytes")
    measured = fine(rows, peak, "context", "mode")
    powers: dict[str, list[float]] = {}
    for series, power in powers_of(grouped(measured, _without("context")), "context", peak):
        powers.setdefault(series[0]["mode"], []).append(power)
    said = "; ".join(f"{spread(some, 2)} in {mode}" for mode, some in powers.items())
    held = [row for row in measured if row.get("held_bytes")]
    try:
        growths = [power for _, power in powers_of(grouped(held, _without("context")), "context", "held_bytes")]
        also = f"; what is held for the backward, to that of {spread(growths, 2)}"
    except NotMeasuredError:
        also = ""
    return f"From the longest two contexts, peak memory grows to the power of {said}{also}."


def quadratic_share(rows: Rows) -> str:
    """What share of the memory held for the backward is tensors of all pairs of tokens, where nothing is recomputed."""
    found = _whole(fine(rows, "quadratic_kept_bytes", "held_bytes", "context"))
    shares = spreads(found, "context", lambda row: 100 * of(row, "quadratic_kept_bytes") / of(row, "held_bytes"))
    said = "; ".join(f"{some} % at {context}" for context, some in shares)
    return f"Of what is held for the backward, tensors of all pairs of tokens are, by context: {said}."


def mixed_memory(rows: Rows) -> str:
    """Peak memory in mixed precision, beside that in float32."""
    peak = column_of(rows, "peak_bytes", "recorded_peak_bytes")
    found = pairs(fine(rows, peak, "dtype", "mode"), "dtype", "float32", "mixed", _without("dtype"))
    ratios: dict[str, list[float]] = {}
    for single, mixed in found:
        ratios.setdefault(single["mode"], []).append(of(mixed, peak) / of(single, peak))
    said = "; ".join(f"{spread(some)} in {mode}" for mode, some in ratios.items())
    return f"The peak in mixed precision is so many times that in float32: {said}."


def recomputing(rows: Rows) -> str:
    """What recomputing blocks changes: what is held, the peak, and the time of a step, by model."""
    peak = column_of(rows, "peak_bytes", "recorded_peak_bytes")
    measured = {name: fine(rows, name, "preset") for name in ("held_bytes", peak, "median_ms")}
    if not any(row.get("every") for row in rows):
        raise NotMeasuredError("no row recomputes blocks")
    said = []
    for preset in dict.fromkeys(row["preset"] for row in rows):
        ratios = [_recomputed(measured[name], name, preset) for name in measured]
        if all(ratios):
            said.append(f"{preset} {ratios[0]}, {ratios[1]} and {ratios[2]}")
    if not said:
        raise NotMeasuredError("no two rows differ in what is recomputed alone")
    return (
        "With blocks recomputed, however many together, what is held for the backward, the peak, and the time of a "
        f"step are so many times what they are without: {'; '.join(said)}."
    )


def _recomputed(rows: Iterable[Line], column: str, preset: str) -> str:
    """The spread of a column of a preset's rows that recompute, over the same without; empty where there are none."""
    series = grouped((row for row in rows if row["preset"] == preset), _without("every"))
    ratios = [
        of(row, column) / of(whole, column)
        for group in series
        for whole in (row for row in group if not row.get("every"))
        for row in group
        if row.get("every")
    ]
    return spread(ratios) if ratios else ""
