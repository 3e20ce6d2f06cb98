"""Tables and plots of the attention benchmark, made from its rows alone: they can be written again at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.attention_account import account_of
from benchmarks.attention_provider import GROUPS, KERNELS, KERNELS_LABEL
from benchmarks.attention_providers import all_providers
from benchmarks.attention_roofline import draw_rooflines
from benchmarks.attention_rows import COLUMNS
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.plots import Axes, Panel, save_panels, series_of
from cs336_systems.profiling.report import (
    ABSENT,
    collected,
    environment_lines,
    format_number,
    markdown_table,
    several_commits,
)
from cs336_systems.profiling.sweep import Row, Status, write_csv


@dataclass(frozen=True)
class Metric:
    """A column of the results that gets tables and plots: its name, a title, a unit, and the passes it is shown for."""

    column: str
    title: str
    unit: str
    logarithmic: bool = True
    passes: tuple[str, ...] = ("forward", "backward", "both")
    level: float | None = None


METRICS = (
    Metric("median_ms", "time", "ms"),
    Metric("tflops", "rate", "TFLOP/s", logarithmic=False),
    Metric("speedup_over_naive", "speed-up over naive", "×", level=1.0),
    Metric("speedup_over_reference", "speed-up over torch's kernel", "×", logarithmic=False, level=1.0),
    Metric("held_mib", "memory held before the backward", "MiB", passes=("backward", "both")),
    Metric("peak_mib", "peak memory", "MiB"),
)


@dataclass(frozen=True)
class Report:
    """What a report is made of: the rows, where they were measured, who was not there and how was measured."""

    rows: Sequence[Row]
    environment: Environment
    missing: dict[str, str]
    method: Sequence[str]

    def write(self, folder: Path, *, plots: bool) -> list[Path]:
        """Write results.csv, tables.md, rows.md and, if asked for, the plots into `folder`; return their paths."""
        written = [folder / "results.csv", folder / "tables.md", folder / "rows.md"]
        write_csv(written[0], self.rows, COLUMNS)
        written[1].write_text(self.tables(), encoding="utf-8")
        written[2].write_text(self.long_table(), encoding="utf-8")
        return written + (draw(folder, self.rows) if plots else [])

    def tables(self) -> str:
        """The Markdown page: environment, method, what did not run, and a lengths × dimensions matrix per metric."""
        parts = ["# Attention benchmark", "\n".join(environment_lines(self.environment))]
        kernels = (
            [f"{KERNELS}: this library's kernels, `{KERNELS_LABEL}` in the plots"] if _has_others(self.rows) else []
        )
        parts += ["\n".join(f"- {sentence}" for sentence in [*self.method, *kernels])]
        if commits := several_commits(self.rows):
            parts.append(commits)
        if self.missing:
            parts += ["Not measured:", "\n".join(f"- {name}: {reason}" for name, reason in self.missing.items())]
        for title, column in (("Without a figure:", "reason"), ("Warnings:", "warning")):
            told = [row for row in self.rows if row[column]]
            states = [f"{row['implementation']}: {row['status']}: {row[column]}" for row in told]
            parts += [title, "\n".join(f"- {text}" for text in collected(states))] if told else []
        for dtype, mask in _groups(self.rows):
            parts.append(f"## {dtype}, {mask}")
            for metric, which, rows in _sections(self.rows, dtype, mask):
                parts += [f"### {_title(metric, which)}, {metric.unit}", _matrix(rows, metric)]
            parts += account_of([row for row in self.rows if (row["dtype"], row["mask"]) == (dtype, mask)])
        return "\n\n".join(parts) + "\n"

    def long_table(self) -> str:
        """Every row as a line of one Markdown table."""
        return "# Attention benchmark, row by row\n\n" + _long_table(self.rows) + "\n"


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw every metric of the rows against length, and rooflines, into PNG files in `folder`; return their paths.

    Where the rows have other libraries' kernels, this library's have the label "ours".
    """
    # All that there are, so that one that is measured in two sweeps looks the same in the figures of both.
    known = _known()
    labels = known | {row["implementation"]: 0 for row in rows if row["implementation"] not in known}
    if _has_others(rows):
        renamed = {KERNELS: KERNELS_LABEL}
        labels = {renamed.get(name, name): group for name, group in labels.items()}
        rows = [{**row, "implementation": renamed.get(row["implementation"], row["implementation"])} for row in rows]
    paths = []
    for dtype, mask in _groups(rows):
        for metric, which, shown in _sections(rows, dtype, mask):
            path = folder / f"{metric.column.replace('_', '-')}-{which}-{dtype}-{mask}.png"
            panels = [_panel(shown, metric, dim, labels) for dim in dict.fromkeys(row["head_dim"] for row in shown)]
            axes = Axes(_length_label(shown), f"{metric.title} ({metric.unit})", metric.logarithmic, metric.level)
            title = f"{_title(metric, which)}: {dtype}, {mask}, {shown[0]['device']}"
            if save_panels(path, panels, title=title, axes=axes, labels=labels):
                paths.append(path)
    return paths + draw_rooflines(folder, rows, labels)


def _known() -> dict[str, int]:
    """Every provider's name, with the number of its group."""
    return {provider.name: GROUPS.index(provider.group) for provider in all_providers(torch.device("cpu"))}


def _has_others(rows: Sequence[Row]) -> bool:
    """Whether the rows have kernels of torch or of other libraries."""
    known = _known()
    return any(known.get(row["implementation"], 0) != GROUPS.index("ours") for row in rows)


def _panel(rows: Sequence[Row], metric: Metric, head_dim: int, labels: Mapping[str, int]) -> Panel:
    rows = [row for row in rows if row["head_dim"] == head_dim]
    points = ((row["implementation"], row["length"], row[metric.column]) for row in rows if row[metric.column])
    heads, kv_heads = rows[0]["heads"], rows[0]["kv_heads"]
    shape = f", {heads} heads" if heads else ""
    return Panel(
        f"d {head_dim}{shape}" + (f", {kv_heads} of k and v" if kv_heads != heads else ""), series_of(points, labels)
    )


def _length_label(rows: Sequence[Row]) -> str:
    batches, tokens = {row["batch"] for row in rows}, {row["batch"] * row["length"] for row in rows}
    if len(batches) == 1:
        return f"length (batch {batches.pop()})"
    return f"length (batch = {tokens.pop():,} / length)" if len(tokens) == 1 else "length"


def _groups(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["dtype"], row["mask"]) for row in rows))


def _sections(rows: Sequence[Row], dtype: str, mask: str) -> Iterable[tuple[Metric, str, list[Row]]]:
    group = [row for row in rows if (row["dtype"], row["mask"]) == (dtype, mask)]
    for metric in METRICS:
        shown = [row for row in group if row["pass"] in metric.passes]
        if metric.column == "held_mib":
            # The same figure stands in the rows of both passes that have a backward: one table is enough.
            shown = [row for row in shown if row["pass"] == shown[0]["pass"]]
        for which in dict.fromkeys(row["pass"] for row in shown):
            of_pass = [row for row in shown if row["pass"] == which]
            if any(row[metric.column] is not None for row in of_pass):
                yield metric, which, of_pass


def _title(metric: Metric, which: str) -> str:
    if metric.column == "held_mib":
        return metric.title.capitalize()
    return f"{'forward and backward' if which == 'both' else which} {metric.title}".capitalize()


def _matrix(rows: Sequence[Row], metric: Metric) -> str:
    """Lengths × head dimensions, for one implementation after the other; a status where there is no figure.

    An implementation that could do none of it is left out: the page says elsewhere why.
    """
    able = {row["implementation"] for row in rows if row["status"] != Status.UNSUPPORTED.value}
    rows = [row for row in rows if row["implementation"] in able]
    dims = list(dict.fromkeys(row["head_dim"] for row in rows))
    cells = {(row["implementation"], row["length"], row["head_dim"]): _cell(row, metric.column) for row in rows}
    places = dict.fromkeys((row["implementation"], row["length"]) for row in rows)
    # Rows come cell by cell; a reader wants an implementation's lengths together.
    names = list(dict.fromkeys(name for name, _ in places))
    ordered = sorted(places, key=lambda place: (names.index(place[0]), place[1]))
    return markdown_table(
        ["implementation", "length", *(f"d {dim}" for dim in dims)],
        [[name, str(length), *(cells.get((name, length, dim), ABSENT) for dim in dims)] for name, length in ordered],
    )


def _cell(row: Row, column: str) -> str:
    value = row[column]
    if value is not None:
        return format_number(value)
    return ABSENT if row["status"] == Status.OK.value else str(row["status"])


def _time(row: Row) -> str:
    if row["median_ms"] is None:
        return ABSENT
    return f"{format_number(row['median_ms'])} ± {format_number(row['std_ms'], 2)}"


_LONG_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("implementation", lambda row: row["implementation"]),
    ("pass", lambda row: row["pass"]),
    ("dtype", lambda row: row["dtype"]),
    ("mask", lambda row: row["mask"]),
    ("batch", lambda row: str(row["batch"])),
    ("heads", lambda row: str(row["heads"] or ABSENT)),
    ("length", lambda row: str(row["length"])),
    ("d", lambda row: str(row["head_dim"])),
    ("ms ± std", _time),
    ("min ms", lambda row: format_number(row["min_ms"])),
    ("max ms", lambda row: format_number(row["max_ms"])),
    ("TFLOP/s", lambda row: format_number(row["tflops"])),
    ("over naive", lambda row: format_number(row["speedup_over_naive"])),
    ("over torch's", lambda row: format_number(row["speedup_over_reference"])),
    ("held MiB", lambda row: format_number(row["held_mib"])),
    ("peak MiB", lambda row: format_number(row["peak_mib"])),
    ("status", lambda row: row["status"]),
)


def _long_table(rows: Sequence[Row]) -> str:
    return markdown_table(
        [title for title, _ in _LONG_COLUMNS],
        [[text(row) for _, text in _LONG_COLUMNS] for row in rows],
    )
