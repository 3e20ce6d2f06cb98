"""Rows of the benchmark of several GPUs, how they compare with one, and the tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.scaling_cell import LONGEST, STEP, STRONG, Cell
from benchmarks.training_report import flops_per_token, rates_of
from cs336_systems.parallel.layout import NONE
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.memory import GIB
from cs336_systems.profiling.report import ABSENT, format_number, markdown_table, report_page
from cs336_systems.profiling.sweep import Row, Status, write_csv

COLUMNS = (
    *("what", "preset", "suite", "vocab_size", "scale", "mode", "processes", "context", "batch", "length", "sequences"),
    *("compile", "recompute_every", "loss_chunk", "status", "reason", "median_ms", "mean_ms", "std_ms", "min_ms"),
    *("step_ms", "host_ms", "tokens_per_second", "efficiency", "work_efficiency", "mfu", "mfu_causal", "peak_gib"),
    *("peak_gib_of_each", "compile_s", "row_s", "parameters", "first_loss", "last_loss", "dtype", "tf32", "device"),
    *("commit", "date"),
)

_SAME_LOSS = 0.01
"""Relative: of the same tokens and parameters, whoever computes it."""


def row_of(cell: Cell, measured: Row, tf32: bool, device_name: str) -> Row:
    """The row of a cell, from what its processes said."""
    tokens = cell.length * cell.sequences
    rates = rates_of(cell.config, tokens, measured, device_name, cell.processes)
    if cell.what == LONGEST:
        # The one step there is has loaded and allocated whatever the first one does.
        rates |= dict.fromkeys(("tokens_per_second", "mfu", "mfu_causal"))
    peaks = [peak for peak in measured.get("peak_bytes_of_each", ()) if peak is not None]
    return {
        **vars(cell),
        "length": cell.length,
        "sequences": cell.sequences,
        **measured,
        **rates,
        "peak_gib_of_each": [round(peak / GIB, 3) for peak in peaks],
        "flops_per_token": flops_per_token(cell.config),
        "tf32": tf32,
    }


def with_efficiency(rows: Sequence[Row]) -> list[Row]:
    """The rows of timed steps, compared with one process: by tokens a second, and by operations a second.

    1 means that n processes have n times the rate of one. Where the sequences become longer with the processes, a
    token takes more operations, and the second says how well the GPUs are used.
    """
    return [row | _efficiency(row, _of_one(rows, row)) for row in rows]


_SAME = ("what", "preset", "suite", "vocab_size", "context", "batch", "compile", "recompute_every", "loss_chunk")


def _of_one(rows: Iterable[Row], row: Row) -> Row:
    """The row of one process with the work of one; none for lengths that are tried."""
    same = (other for other in rows if all(other[name] == row[name] for name in _SAME) and other["mode"] == NONE)
    return next(same, {}) if row["what"] == STEP else {}


def _efficiency(row: Row, one: Row) -> Row:
    mine, theirs = row.get("tokens_per_second"), one.get("tokens_per_second")
    if not mine or not theirs:
        return {"efficiency": None, "work_efficiency": None}
    efficiency = mine / (row["processes"] * theirs)
    return {
        "efficiency": efficiency,
        "work_efficiency": efficiency * row["flops_per_token"] / one["flops_per_token"],
    }


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be: the same sequences have one first loss, however many processes share them."""
    texts = []
    for row in rows:
        one = _of_one(rows, row)
        known = row["status"] == Status.OK.value and one.get("status") == Status.OK.value
        if known and row["scale"] == STRONG and abs(row["first_loss"] / one["first_loss"] - 1) > _SAME_LOSS:
            losses = f"{row['first_loss']:.4f}, and {one['first_loss']:.4f} on one process"
            texts.append(f"{_name(row)}: the first loss is {losses}; one of them is wrong")
    return texts


def _name(row: Row) -> str:
    return f"{row['preset']}, {row['sequences']} × {row['length']}, {row['mode']} on {row['processes']}"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f} %"


_STEP_HEADERS = (
    *("preset, sequences × length", "processes", "scale", "step, ms", "± std", "tokens/s", "efficiency"),
    *("of the work", "MFU", "peak a GPU, GiB", "compiling, s", "row, s"),
)


def step_line(row: Row) -> list[str]:
    """A row of timed steps as a line of their table."""
    return [
        f"{row['preset']}, {row['sequences']} × {row['length']}, {row['mode']}",
        str(row["processes"]),
        row["scale"],
        format_number(row["median_ms"], 4) if row["status"] == Status.OK.value else row["status"],
        *(format_number(row.get(name)) for name in ("std_ms", "tokens_per_second")),
        *(_percent(row.get(name)) for name in ("efficiency", "work_efficiency", "mfu")),
        *(format_number(row.get(name)) for name in ("peak_gib", "compile_s", "row_s")),
    ]


_LONGEST_HEADERS = ("preset, mode", "processes", "longest", "× one", "peak a GPU, GiB", "step, s", "did not fit")


def longest_lines(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each mode and number of processes: the longest that fitted, and the shortest that did not."""
    tried = [row for row in rows if row["what"] == LONGEST]
    groups = dict.fromkeys(map(_group, tried))
    found = {group: _longest(row for row in tried if _group(row) == group) for group in groups}
    lines = []
    for group, (fits, fails) in found.items():
        one = next((best for other, (best, _) in found.items() if other[:-2] == group[:-2] and other[-2] == NONE), None)
        length = fits["length"] if fits else None
        more = {"recompute every": group[3], "loss chunk": group[4]}
        others = "".join(f", {name} {value}" for name, value in more.items() if value is not None)
        lines.append(
            [
                f"{group[0]}, {group[-2]}{others}{', compiled' if group[5] else ''}",
                str(group[-1]),
                f"{length:,}" if length else ABSENT,
                format_number(length / one["length"]) if length and one else ABSENT,
                format_number(fits.get("peak_gib")) if fits else ABSENT,
                format_number(fits["median_ms"] / 1e3) if fits else ABSENT,
                f"{fails['length']:,} ({fails['status']})" if fails else ABSENT,
            ]
        )
    return lines


def _group(row: Row) -> tuple[object, ...]:
    names = ("preset", "suite", "vocab_size", "recompute_every", "loss_chunk", "compile", "mode", "processes")
    return tuple(row[name] for name in names)


def _longest(rows: Iterable[Row]) -> tuple[Row | None, Row | None]:
    """Of one mode and number of processes, the longest that fitted and the shortest that did not."""
    tried = sorted(rows, key=lambda row: row["length"])
    fits = [row for row in tried if row["status"] == Status.OK.value]
    fails = [row for row in tried if row["status"] != Status.OK.value]
    return fits[-1] if fits else None, fails[0] if fails else None


def report(rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> str:
    """The tables, with what they were measured in and how, and why some rows have no figure."""
    steps = [row for row in with_efficiency(rows) if row["what"] == STEP]
    tried = longest_lines(rows)
    reasons = [f"{_name(row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != Status.OK.value]
    parts = []
    if steps:
        parts.append("## Steps\n\n" + markdown_table(_STEP_HEADERS, map(step_line, steps)))
    if tried:
        parts.append("## The longest sequence that fits\n\n" + markdown_table(_LONGEST_HEADERS, tried))
    return report_page("Several GPUs", environment, method, parts, warned=warnings_of(rows), reasons=reasons)


def write(folder: Path, rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> None:
    """The files for people, from all rows that there are."""
    write_csv(folder / "results.csv", with_efficiency(rows), COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment, method))
