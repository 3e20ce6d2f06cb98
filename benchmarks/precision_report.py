"""Tables of the precision benchmark, made of its rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.precision_cells import ACCUMULATION, ATTENTION, AUTOCAST, RESULTS
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.plots import Axes, Panel, save_panels, series_of
from cs336_systems.profiling.precision import RESULT
from cs336_systems.profiling.report import ABSENT, collected, environment_lines, markdown_table
from cs336_systems.profiling.sweep import Row, Status, write_csv

_MEASURES = ("norm", "norm_budget", "relative", "largest", "largest_budget")
COLUMNS = (
    *("kind", "dtype", "name", "status", "reason", "accumulator", "addend", "cast", "total", "total_error"),
    *("what", "module", "found", "mask", "batch", "heads", "length", "head_dim", "of_budget", "within_budget"),
    *(f"{result}_{measure}" for result in RESULTS for measure in _MEASURES),
    *("tf32", "seed", "row_s", "device", "commit", "date"),
)


def report(rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> str:
    """The page: environment, method, and the three tables, as far as they were measured."""
    fine = [row for row in rows if row["status"] == Status.OK.value]
    parts = [
        "# Precision",
        "\n".join(environment_lines(environment)),
        "\n".join(f"- {sentence}" for sentence in method),
    ]
    if sums := [row for row in fine if row["kind"] == ACCUMULATION]:
        parts += ["## 1000 × 0.01, added up one by one", accumulation_table(sums)]
    if seen := [row for row in fine if row["kind"] == AUTOCAST]:
        parts += ["## Dtypes of a toy model under autocast", dtype_table(seen)]
    if of_attention := [row for row in fine if row["kind"] == ATTENTION]:
        parts += ["## Error of attention against float64", *error_tables(of_attention)]
    if reasons := [f"{_named(row)}: {row['status']}: {row['reason']}" for row in rows if row not in fine]:
        parts += ["## Without a figure", "\n".join(f"- {text}" for text in collected(reasons))]
    return "\n\n".join(parts) + "\n"


def _named(row: Row) -> str:
    return " ".join(str(row[column]) for column in ("kind", "dtype", "name") if row.get(column))


def accumulation_table(rows: Sequence[Row]) -> str:
    """What each loop comes to."""
    return markdown_table(
        ["way", "sum in", "terms in", "cast first", "total", "exactly", "off by"],
        [
            [
                *(row["name"], row["accumulator"], row["addend"], "yes" if row["cast"] else "no"),
                *(f"{row['total']:.4f}", str(row["total"]), f"{row['total_error']:+.4f}"),
            ]
            for row in rows
        ],
    )


def dtype_table(rows: Sequence[Row]) -> str:
    """A line for each tensor of the step, a column for each dtype of autocast."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    found = {(row["what"], row["name"], row["module"], row["dtype"]): row["found"] for row in rows}
    tensors = dict.fromkeys((row["what"], row["name"], row["module"]) for row in rows)
    return markdown_table(
        ["tensor", "of", "module", *(f"autocast {dtype}" for dtype in dtypes)],
        [
            ["logits" if what == RESULT else what, name or ABSENT, module or ABSENT]
            + [found.get((what, name, module, dtype), ABSENT) for dtype in dtypes]
            for what, name, module in tensors
        ],
    )


def error_tables(rows: Sequence[Row]) -> list[str]:
    """Two tables for each dtype and mask: norms relative to the result's, and the largest beside its budget."""
    parts = []
    for dtype, mask in dict.fromkeys((row["dtype"], row["mask"]) for row in rows):
        group = [row for row in rows if (row["dtype"], row["mask"]) == (dtype, mask)]
        parts += [f"### {dtype}, {mask}: norm of the error, relative to the result's", _relative_table(group)]
        parts += [f"### {dtype}, {mask}: largest error, and its budget", _largest_table(group)]
    return parts


def _relative_table(rows: Sequence[Row]) -> str:
    return markdown_table(
        ["implementation", "length", "d", *RESULTS, "most of a budget", "within"],
        [
            [
                *(row["name"], str(row["length"]), str(row["head_dim"])),
                *(scientific(row.get(f"{name}_relative")) for name in RESULTS),
                ABSENT if row["of_budget"] is None else f"{100 * row['of_budget']:.0f} %",
                "yes" if row["within_budget"] else "NO",
            ]
            for row in _ordered(rows)
        ],
    )


def _largest_table(rows: Sequence[Row]) -> str:
    def cell(row: Row, name: str) -> str:
        if row.get(f"{name}_largest") is None:
            return ABSENT
        return f"{scientific(row[f'{name}_largest'])} / {scientific(row[f'{name}_largest_budget'])}"

    return markdown_table(
        ["implementation", "length", "d", *RESULTS],
        [
            [row["name"], str(row["length"]), str(row["head_dim"]), *(cell(row, name) for name in RESULTS)]
            for row in _ordered(rows)
        ],
    )


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """An implementation's lengths together."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    return sorted(rows, key=lambda row: (names.index(row["name"]), row["head_dim"], row["length"]))


def scientific(value: float | None) -> str:
    """An error: two digits, with an exponent, since errors of dtypes are powers of ten apart."""
    return ABSENT if value is None else "0" if value == 0 else f"{value:.1e}"


def write(folder: Path, rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> None:
    """The files for people, from all rows that there are."""
    write_csv(folder / "results.csv", rows, COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment, method), encoding="utf-8")


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Plot the output's error against the length, a figure for each mask; their paths, none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    fine = [row for row in rows if row["kind"] == ATTENTION and row["status"] == Status.OK.value]
    labels = dict.fromkeys([row["name"] for row in fine], 0)
    paths = []
    for mask in dict.fromkeys(row["mask"] for row in fine):
        panels = []
        for dtype, dim in dict.fromkeys((row["dtype"], row["head_dim"]) for row in fine if row["mask"] == mask):
            group = [row for row in fine if (row["mask"], row["dtype"], row["head_dim"]) == (mask, dtype, dim)]
            points = ((row["name"], row["length"], row["out_relative"]) for row in group if row["out_relative"])
            panels.append(Panel(f"{dtype}, d {dim}", series_of(points, labels)))
        path = folder / f"error-{mask}.png"
        axes = Axes("length", "error of the output, relative")
        if save_panels(path, panels, title=f"Error against float64, {mask}", axes=axes, labels=labels):
            paths.append(path)
    return paths
