"""The rows of the features benchmark, and the table made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.comparison import plausible_difference
from benchmarks.feature_cases import CASES, OURS, PEERS, PLAIN
from benchmarks.feature_cells import BESIDE, Cell, Conditions, Measurement
from cs336_systems.profiling.report import ABSENT, format_number, markdown_table
from cs336_systems.profiling.sweep import Row, Status

COLUMNS = (
    *("case", "pass", "head_dim", "batch", "heads", "length", "dtype", "implementation", "status", "reason"),
    *("median_ms", "min_ms", "max_ms", "rounds", "speedup_of_ours", "of_plain", "visible", "first_call_s"),
    *("difference", "warning"),
)


def rows_of(
    cell: Cell,
    conditions: Conditions,
    measured: Mapping[str, Measurement],
    compile_s: Mapping[str, float] | None = None,
) -> list[Row]:
    """A row for each contender of a cell. `compile_s` are seconds of first calls that found nothing in caches."""
    dtype = str(conditions.dtype).removeprefix("torch.")
    ours = measured.get(OURS, Measurement()).times
    beside = measured.get(OURS if cell.case == PLAIN else BESIDE, Measurement()).times
    rows = []
    for name, measurement in measured.items():
        times, first_call_s = measurement.times, (compile_s or {}).get(name, measurement.ready_s)
        rows.append(
            {
                "case": cell.case,
                "pass": cell.which,
                **cell.sizes._asdict(),
                "dtype": dtype,
                "implementation": name,
                "status": measurement.outcome.status.value,
                "reason": measurement.outcome.reason,
                "median_ms": times and times.median,
                "min_ms": times and times.minimum,
                "max_ms": times and times.maximum,
                "rounds": times and len(times.milliseconds),
                "speedup_of_ours": ours.speedup_over(times) if ours and times and name != OURS else None,
                "of_plain": 1 / times.speedup_over(beside) if times and beside else None,
                "visible": CASES[cell.case].visible(cell.sizes),
                "first_call_s": None if first_call_s is None else round(first_call_s, 2),
                "difference": _finite(measurement.difference),
                "warning": _warning(measurement.difference, dtype, cell.which),
            }
        )
    return rows


def _finite(difference: float | None) -> float | None:
    # The journal is JSON, which has no infinity.
    return None if difference is None else min(difference, 1e9)


def _warning(difference: float | None, dtype: str, which: str) -> str:
    allowed = plausible_difference(dtype, gradients=which != "forward")
    if difference is None or difference <= allowed:
        return ""
    return f"its results differ from ours by {difference:.2g} of their norm; allowed are {allowed:g}"


def lines_of(rows: Iterable[Row]) -> list[list[str]]:
    """A line for each cell: times, our speed-up over the best peer, and multiples of our plain causal attention."""
    cells: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[column] for column in COLUMNS[:7])
        cells.setdefault(key, {})[row["implementation"]] = row
    return [_line(by_name) for by_name in cells.values()]


def _line(by_name: Mapping[str, Row]) -> list[str]:
    facts = next(iter(by_name.values()))
    timed = {name: row for name, row in by_name.items() if row["median_ms"] is not None}
    peers = {name: timed[name] for name in PEERS if name in timed}
    best = min(peers, key=lambda name: peers[name]["median_ms"]) if peers and OURS in timed else None
    return [
        f"{facts['case']}, {facts['pass']}",
        *(str(facts[column]) for column in ("head_dim", "batch", "length")),
        f"{100 * facts['visible']:.3g}",
        *(format_number(timed[name]["median_ms"]) if name in timed else ABSENT for name in (OURS, *PEERS)),
        format_number(peers[best]["speedup_of_ours"]) if best else ABSENT,
        best or ABSENT,
        format_number(timed[OURS]["of_plain"] if OURS in timed else None),
    ]


HEADERS = (
    *("case", "d", "batch", "length", "visible, %", f"{OURS}, ms", *(f"{name}, ms" for name in PEERS)),
    *("over the best peer, ×", "best peer", "of plain causal, ×"),
)


def report(rows: Sequence[Row], environment: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The table, and why what has no figure has none."""
    reasons = [
        f"- {name_of(row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != Status.OK.value
    ]
    warnings = [f"- {name_of(row)}: {row['warning']}" for row in rows if row["warning"]]
    parts = ["# Features of attention", "", *environment, *(f"- {note}" for note in notes), ""]
    parts += [markdown_table(HEADERS, lines_of(rows)), ""]
    for title, texts in (("Without a figure", reasons), ("Warnings", warnings)):
        if texts:
            parts += [f"## {title}", "", *texts, ""]
    return "\n".join(parts)


def name_of(row: Row) -> str:
    """A row, for people."""
    return f"{row['implementation']} {row['case']}, {row['pass']}, d {row['head_dim']}, length {row['length']}"
