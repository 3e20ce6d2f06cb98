"""Rows of the benchmark of memory, and its tables for people."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.memory_cell import FLOAT32, MIXED, STEP, Cell, analytic_columns
from cs336_systems.profiling.categories import CATEGORIES
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.memory import MIB
from cs336_systems.profiling.recording import EXPLAINED, GRADIENT, OPTIMIZER_STATE
from cs336_systems.profiling.report import ABSENT, environment_lines, format_number, markdown_table
from cs336_systems.profiling.sweep import Row, Status, write_csv
from cs336_systems.profiling.usage import BACKWARD, FORWARD, OPTIMIZER

_CELL = ("preset", "suite", "vocab_size", "context", "batch", "model", "mode", "dtype", "every")
COLUMNS = (
    *_CELL,
    *("d_model", "d_ff", "num_layers", "num_heads", "parameters", "status", "reason", "allocated_bytes", "peak_bytes"),
    *("reserved_bytes", "held_bytes", "memory_method", "estimate_bytes", "residual_bytes", "quadratic_bytes"),
    *("quadratic_kept_bytes", "saved_bytes", "parameter_copies_bytes", "block_bytes", "block_estimate_bytes"),
    *("recorded_peak_bytes", "recording_method", "median_ms", "min_ms", "best_every", "row_s", "tf32", "seed"),
    *("device", "commit", "date"),
)
"""Of results.csv."""
LARGEST_COLUMNS = (*_CELL, "list", "category", "phase", "bytes", "times", "module", "operation", "place")
"""Of largest.csv."""
OPERATION_COLUMNS = (*_CELL, "module", "source", "bytes", "tensors")
"""Of operations.csv."""
CATEGORY_COLUMNS = (*_CELL, "category", "bytes")
"""Of at-peak.csv."""
_PHASE_OF = {GRADIENT: BACKWARD, OPTIMIZER_STATE: OPTIMIZER}


def best_block_size(cell: Cell, device_type: str) -> int:
    """How many blocks recomputed together take the least memory, by the trainer's estimate of a step.

    Kept are the inputs of ⌈L / k⌉ groups, and of one group everything: k is about √(L · input / block).
    """
    layers = cell.config.num_layers
    sizes = {k: _with_every(cell, k).estimate(device_type).total for k in range(1, layers + 1)}
    return min(sizes, key=sizes.__getitem__)


def _with_every(cell: Cell, every: int) -> Cell:
    return Cell(cell.preset, cell.suite, cell.sizes, cell.batch, cell.model, cell.mode, cell.dtype, every)


def row_of(cell: Cell, found: Row, options: argparse.Namespace) -> Row:
    """The row of a cell, from what its process returned."""
    config = cell.config
    return {
        "preset": cell.preset,
        "suite": cell.suite,
        "vocab_size": config.vocab_size,
        "context": cell.context,
        "batch": cell.batch,
        "model": cell.model,
        "mode": cell.mode,
        "dtype": cell.dtype,
        "every": cell.every,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "num_heads": config.num_heads,
        **analytic_columns(cell, options.device),
        "best_every": best_block_size(cell, options.device.type),
        **found,
        "tf32": options.tf32,
        "seed": options.seed,
    }


def fine(rows: Iterable[Row]) -> list[Row]:
    """Those that were measured."""
    return [row for row in rows if row["status"] == Status.OK.value]


def name_of(row: Row) -> str:
    """The row in words, as its tables begin."""
    kept = "" if row["every"] is None else f", recomputed by {row['every']}"
    return f"{row['preset']}, {row['batch']} × {row['context']}, {row['model']}, {row['mode']}, {row['dtype']}{kept}"


def mib(size: float | None) -> str:
    """Bytes in MiB."""
    return ABSENT if size is None else format_number(size / MIB)


def _table_of_memory(rows: Sequence[Row]) -> str:
    headers = ("preset, batch × context, attention, passes, dtype", "allocated before", "peak", "reserved", "held")
    more = ("saved", "estimate of a step", "residual stream", "one quadratic tensor", "those kept", "ms")
    names = (
        *("allocated_bytes", "peak_bytes", "reserved_bytes", "held_bytes", "saved_bytes", "estimate_bytes"),
        *("residual_bytes", "quadratic_bytes", "quadratic_kept_bytes"),
    )
    lines = []
    for row in rows:
        failed = row["status"] != Status.OK.value
        shown = [mib(row.get(name)) for name in names]
        shown[1] = row["status"] if failed else shown[1]
        lines.append([name_of(row), *shown, format_number(row.get("median_ms"))])
    return markdown_table((*headers, *more), lines)


def _pairs_of_dtypes(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    def work(row: Row) -> tuple[object, ...]:
        return tuple(row[name] for name in _CELL if name != "dtype")

    mixed = {work(row): row for row in rows if row["dtype"] == MIXED}
    return [(row, mixed[work(row)]) for row in rows if row["dtype"] == FLOAT32 and work(row) in mixed]


def _table_of_dtypes(rows: Sequence[Row]) -> str | None:
    lines = []
    for wide, narrow in _pairs_of_dtypes(fine(rows)):
        cells = [name_of(wide).replace(f", {FLOAT32}", "")]
        for name in ("peak_bytes", "held_bytes"):
            one, other = wide.get(name), narrow.get(name)
            cells += [mib(one), mib(other), ABSENT if one is None or other is None else mib(other - one)]
        lines.append(cells)
    headers = (
        "what",
        "peak, float32",
        "peak, mixed",
        "difference",
        "held, float32",
        "held, mixed",
        "difference of held",
    )
    return markdown_table(headers, lines) if lines else None


def largest_of(row: Row) -> dict[str, int]:
    """The largest single allocation of each category, in bytes: of activations in the forward pass."""
    wanted = {category: _PHASE_OF.get(category, FORWARD) for category in CATEGORIES}
    found = {each["category"]: each["bytes"] for each in row["largest_of_category"][::-1] if _is(each, wanted)}
    return {category: found[category] for category in CATEGORIES if category in found}


def _is(each: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return wanted.get(each["category"]) == each["phase"]


def _table_of_categories(rows: Sequence[Row]) -> str | None:
    found = {name_of(row): largest_of(row) for row in fine(rows)}
    names = [category for category in CATEGORIES if any(category in sizes for sizes in found.values())]
    lines = [[name, *(mib(sizes.get(category)) for category in names)] for name, sizes in found.items()]
    return markdown_table(("what", *names), lines) if lines else None


def _tables_of_largest(rows: Sequence[Row]) -> list[str]:
    headers = ("category", "phase", "MiB", "times", "module", "operation", "statement")
    parts = []
    for row in fine(rows):
        lines = [
            [each["category"], each["phase"], mib(each["bytes"]), str(each["times"])]
            + [each[name] for name in ("module", "operation", "place")]
            for each in row["largest"]
        ]
        parts.append(f"### {name_of(row)}\n\n{markdown_table(headers, lines)}")
    return parts


def _tables_of_block(rows: Sequence[Row]) -> list[str]:
    parts = []
    for row in fine(rows):
        whole, estimate = row.get("block_bytes"), row.get("block_estimate_bytes")
        if whole and estimate and row["mode"] != STEP:
            lines = [
                [f"{each['module']} `{each['source']}`", mib(each["bytes"]), f"{100 * each['bytes'] / whole:.1f} %"]
                for each in row["operations"]
            ]
            said = f"One block keeps {mib(whole)} MiB; by the trainer's formula {mib(estimate)} MiB, "
            said += f"so that measured / formula is {whole / estimate:.4f}."
            table = markdown_table(("operation", "MiB", "of the block"), lines)
            parts.append(f"### {name_of(row)}\n\n{said}\n\n{table}")
    return parts


def checkpointed(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Steps that differ in the blocks recomputed together alone, where there are any, with that of none, in order."""
    groups: dict[str, list[Row]] = {}
    for row in fine(rows):
        if row["mode"] == STEP:
            groups.setdefault(name_of(row | {"every": None}), []).append(row)
    several = {name: same for name, same in groups.items() if any(row["every"] for row in same)}
    return {name: sorted(same, key=lambda row: row["every"] or 0) for name, same in several.items()}


def _tables_of_checkpointing(rows: Sequence[Row]) -> list[str]:
    parts = []
    for name, same in checkpointed(rows).items():
        least = min(same, key=lambda row: row["peak_bytes"])
        lines = [
            [
                str(row["every"] or "none"),
                *(mib(row[size]) for size in ("peak_bytes", "estimate_bytes", "held_bytes")),
                format_number(row["median_ms"]),
            ]
            for row in same
        ]
        said = f"Least measured: {least['every'] or 'none'}; of all sizes the formula has its least at "
        said += f"{same[0]['best_every']}, of {same[0]['num_layers']} blocks."
        headers = ("blocks recomputed together", "peak, MiB", "formula, MiB", "held, MiB", "step, ms")
        parts.append(f"### {name}\n\n{said}\n\n{markdown_table(headers, lines)}")
    return parts


def report(rows: Sequence[Row], environment: Environment) -> str:
    """The tables, with what they were measured in, and why some rows have no figure."""
    methods = list(dict.fromkeys(row["memory_method"] for row in fine(rows)))
    parts = ["# Memory", "\n".join(environment_lines(environment))]
    parts += ["Memory from: " + ", ".join(methods) + ". All sizes in MiB."] if methods else []
    parts += [EXPLAINED[method] for method in dict.fromkeys(row["recording_method"] for row in fine(rows))]
    parts.append(_table_of_memory(rows))
    sections: dict[str, Sequence[str | None]] = {
        "Mixed precision": [_table_of_dtypes(rows)],
        "The largest single allocation": [_table_of_categories(rows)],
        "Kept by one block for the backward pass": _tables_of_block(rows),
        "Activation checkpointing": _tables_of_checkpointing(rows),
        "The largest allocations": _tables_of_largest(rows),
        "Without a figure": [
            "\n".join(
                f"- {name_of(row)}: {row['status']}: {row['reason']}"
                for row in rows
                if row["status"] != Status.OK.value
            )
        ],
    }
    for title, texts in sections.items():
        said = [text for text in texts if text]
        parts += [f"## {title}", *said] if said else []
    return "\n\n".join(parts) + "\n"


def _listed(rows: Sequence[Row], name: str, **columns: str) -> list[Row]:
    return [{**row, **columns, **each} for row in fine(rows) for each in row.get(name, [])]


def write(folder: Path, rows: Sequence[Row], environment: Environment) -> None:
    """The files for people, from all rows that there are."""
    write_csv(folder / "results.csv", rows, COLUMNS)
    largest = _listed(rows, "largest", list="largest") + _listed(rows, "largest_of_category", list="of category")
    write_csv(folder / "largest.csv", largest, LARGEST_COLUMNS)
    write_csv(folder / "operations.csv", _listed(rows, "operations"), OPERATION_COLUMNS)
    peaks = [{**row, "category": name, "bytes": size} for row in fine(rows) for name, size in row["at_peak"].items()]
    write_csv(folder / "at-peak.csv", peaks, CATEGORY_COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment), encoding="utf-8")
