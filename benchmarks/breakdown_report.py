"""Rows of the breakdown, and the tables for people."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.breakdown_cell import MODES, OPERATORS, PASSES_OF, Cell, share_column
from cs336_systems.profiling.bars import save_stacked_bars
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.kernel_classes import CLASSES, MATMUL, OTHER
from cs336_systems.profiling.regions import PARTS
from cs336_systems.profiling.report import ABSENT, environment_lines, format_number, markdown_table, several_commits
from cs336_systems.profiling.shares import WHOLE, total_ms
from cs336_systems.profiling.sweep import Row, Status, write_csv

_SIZES = ("preset", "suite", "vocab_size", "context", "batch", "model", "compile", "dtype")
_PASSES = PASSES_OF["step"]
_PART_NAMES = tuple(region.rpartition(" ")[2] for region in PARTS)
COLUMNS = (
    *_SIZES,
    *("mode", "status", "reason", "median_ms", "mean_ms", "std_ms", "min_ms", "max_ms", "profiled_ms"),
    *("profiler_cost", "measured", "work_ms", "busy", "instances"),
    *(share_column(name) for name in CLASSES),
    *(f"{share_column(MATMUL)}_{name}" for name in _PASSES),
    *("top", "top_no_product", *(f"top_{name}" for name in _PASSES)),
    *(f"{name}_ms" for name in (*_PART_NAMES, "products")),
    *(f"{name}_flops" for name in _PART_NAMES),
    *("softmax_over_products_time", "softmax_over_products_flops"),
    *("row_s", "parameters", "tf32", "device", "commit", "date"),
)
"""Of results.csv."""
KERNEL_COLUMNS = (
    *(*_SIZES, "mode", "of_pass", "name", "of_class", "milliseconds", "share", "instances", "mean_us", "median_us"),
    *("min_us", "max_us", "std_us"),
)
"""Of kernels.csv: a line for each kernel in each pass, and in all of them."""
REGION_COLUMNS = (*_SIZES, "mode", "of_pass", "region", "of_class", "milliseconds", "share")
"""Of regions.csv: a line for each pass, region and class."""
PLOT = "shares.png"

_LONGEST_NAME = 76
_MOST_KERNELS, _MOST_OTHERS = 10, 5


def row_of(cell: Cell, measured: Row, tf32: bool) -> Row:
    """The row of a cell, from what its process returned."""
    work = cell.work
    return {
        "preset": work.preset,
        "suite": work.suite,
        "vocab_size": work.vocab_size,
        "context": work.context,
        "batch": work.batch,
        "model": work.model,
        "compile": work.compiles,
        "dtype": cell.dtype,
        "mode": cell.mode,
        **measured,
        "parameters": work.config.parameters(),
        "tf32": tf32,
    }


def name_of(row: Row) -> str:
    """A row's configuration in words, without its mode."""
    compiled = "" if row["compile"] == "none" else f", compiled {row['compile']}"
    return f"{row['preset']}, {row['batch']} × {row['context']}, {row['model']}{compiled}, {row['dtype']}"


def short_name(name: str, most: int = _LONGEST_NAME) -> str:
    """The name of a kernel without what says little, cut in its middle where it is long."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "autograd::engine::"):
        name = name.replace(noise, "")
    if len(name) <= most:
        return name
    kept = (most - 1) // 2
    return f"{name[:kept]}…{name[-kept:]}"


def percent(share: float | None) -> str:
    """A share for people."""
    return ABSENT if share is None else f"{100 * share:.1f} %"


def profiled_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that have kernels: not those that failed, nor those that ran for Nsight Systems."""
    return [row for row in rows if row["status"] == Status.OK.value and "kernels" in row]


def times_table(rows: Sequence[Row]) -> str:
    """Times without the profiler, which are the figures to go by, and what the profiler added."""
    headers = (
        *("configuration", "mode", "step, ms", "± std", "min", "max", "profiled, ms", "profiler's cost"),
        *("work, ms", "busy", "instances"),
    )
    lines = []
    for row in rows:
        fine = row["status"] == Status.OK.value
        cost = row.get("profiler_cost")
        lines.append(
            [
                name_of(row),
                row["mode"],
                format_number(row["median_ms"], 4) if fine else row["status"],
                *(format_number(row.get(name)) for name in ("std_ms", "min_ms", "max_ms")),
                format_number(row.get("profiled_ms"), 4),
                ABSENT if cost is None else f"{100 * (cost - 1):+.0f} %",
                format_number(row.get("work_ms"), 4),
                percent(row.get("busy")),
                format_number(row.get("instances")),
            ]
        )
    return markdown_table(headers, lines)


def class_table(rows: Sequence[Row]) -> str:
    """The share of each class that any row has."""
    shown = [name for name in CLASSES if any(row[share_column(name)] for row in rows)]
    lines = [[name_of(row), row["mode"], *(percent(row[share_column(name)]) for name in shown)] for row in rows]
    return markdown_table(("configuration", "mode", *shown), lines)


def product_table(rows: Sequence[Row]) -> str:
    """The share of all matrix products: a line for each configuration, a column for each mode, and passes of a step."""
    by_pass = [f"{name} of a step" for name in _PASSES]
    lines = []
    for name in dict.fromkeys(map(name_of, rows)):
        modes = {row["mode"]: row for row in rows if name_of(row) == name}
        of_modes = [modes.get(mode, {}).get(share_column(MATMUL)) for mode in MODES]
        of_passes = [modes.get("step", {}).get(f"{share_column(MATMUL)}_{each}") for each in _PASSES]
        lines.append([name, *map(percent, (*of_modes, *of_passes))])
    return markdown_table(("configuration", *MODES, *by_pass), lines)


def top_table(rows: Sequence[Row]) -> str:
    """The kernel of each pass that takes most of its time."""
    lines = []
    for row in rows:
        for name in PASSES_OF[row["mode"]]:
            for kernel in kernels_of(row, name)[:1]:
                cells = [short_name(kernel["name"]), kernel["of_class"], percent(kernel["share"])]
                lines.append([name_of(row), row["mode"], name, *cells, format_number(kernel["milliseconds"])])
    return markdown_table(("configuration", "mode", "pass", "kernel", "class", "share of the pass", "ms"), lines)


def parts_table(rows: Sequence[Row]) -> str:
    """Inside naive attention; empty without a row that tells its parts apart."""
    lines = [
        [
            name_of(row),
            row["mode"],
            *(format_number(row[f"{name}_ms"]) for name in (*_PART_NAMES, "products")),
            *(format_number(row[f"{name}_flops"] * 1e-9) for name in _PART_NAMES),
            format_number(row["softmax_over_products_time"]),
            format_number(row["softmax_over_products_flops"]),
        ]
        for row in rows
        if row.get("softmax_ms") is not None
    ]
    headers = (
        *("configuration", "mode", *(f"{name}, ms" for name in _PART_NAMES), "products, ms"),
        *(*(f"{name}, GFLOP" for name in _PART_NAMES), "softmax / products, time", "softmax / products, FLOPs"),
    )
    return markdown_table(headers, lines) if lines else ""


def region_table(row: Row) -> str:
    """Milliseconds of a row's step by region, a column for each pass."""
    sums = row["totals"]
    passes = [*PASSES_OF[row["mode"]], *(name for name in sums if name not in PASSES_OF[row["mode"]])]
    regions = sorted(
        {region for found in sums.values() for region in found}, key=lambda one: -total_ms(sums, region=one)
    )
    everything = total_ms(sums)
    lines = []
    for region in regions:
        here = total_ms(sums, region=region)
        of_passes = [format_number(total_ms(sums, of_pass=name, region=region)) for name in passes]
        share = here / everything if everything else None
        products = format_number(total_ms(sums, region=region, of_class=MATMUL))
        lines.append([region, *of_passes, format_number(here), percent(share), products])
    return markdown_table(("region", *(f"{name}, ms" for name in passes), "ms", "share", "products, ms"), lines)


def kernels_of(row: Row, of_pass: str = WHOLE) -> list[Row]:
    """A row's kernels in a pass, or in all of them, those that take longest first."""
    return [kernel for kernel in row["kernels"] if kernel["of_pass"] == of_pass]


def kernel_table(kernels: Sequence[Row]) -> str:
    """Kernels with their statistics."""
    lines = [
        [
            short_name(kernel["name"]),
            kernel["of_class"],
            format_number(kernel["milliseconds"]),
            percent(kernel["share"]),
            format_number(kernel["instances"]),
            *(format_number(kernel[f"{name}_us"]) for name in ("mean", "median", "min", "max", "std")),
        ]
        for kernel in kernels
    ]
    headers = ("kernel", "class", "ms", "share", "instances", "mean, µs", "median", "min", "max", "std")
    return markdown_table(headers, lines)


def details(row: Row) -> str:
    """The section of one row: its regions, its kernels, those that are no products, and names that are not known."""
    kernels = kernels_of(row)
    others = [kernel for kernel in kernels if kernel["of_class"] != MATMUL]
    unknown = [kernel["name"] for kernel in kernels if kernel["of_class"] == OTHER]
    parts = [
        f"## {name_of(row)}: {row['mode']}",
        f"Of {row['measured']}, for one step, profiled.",
        region_table(row),
        f"The {_MOST_KERNELS} that take longest:\n\n{kernel_table(kernels[:_MOST_KERNELS])}",
        f"The {_MOST_OTHERS} that take longest without being matrix products:\n\n{kernel_table(others[:_MOST_OTHERS])}",
    ]
    if unknown:
        parts.append("Not classified: " + ", ".join(f"`{short_name(name)}`" for name in unknown))
    return "\n\n".join(parts)


def report(rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> str:
    """Every table, with what it was measured in and how, and why some rows have no figure."""
    profiled = profiled_rows(rows)
    if any(row["measured"] == OPERATORS for row in profiled):
        method = [*method, "without kernels in the trace, work is operators on the host, without those that they call"]
    sections: list[tuple[str, Callable[[Sequence[Row]], str]]] = [
        ("The share of each class, profiled", class_table),
        ("The share of all matrix products, profiled", product_table),
        ("The top kernel of each pass, profiled", top_table),
        ("Inside attention, profiled", parts_table),
    ]
    parts = [
        "# Where the time goes",
        "\n".join(environment_lines(environment)),
        "\n".join(f"- {text}" for text in method),
        *filter(None, [several_commits(rows)]),
        "## Times without the profiler, and with it\n\n" + times_table(rows),
    ]
    if profiled:
        parts += [f"## {title}\n\n{table}" for title, make in sections if (table := make(profiled))]
        parts += map(details, profiled)
    reasons = [
        f"- {name_of(row)}, {row['mode']}: {row['status']}: {row['reason']}"
        for row in rows
        if row["status"] != Status.OK.value
    ]
    if reasons:
        parts.append("## Without a figure\n\n" + "\n".join(reasons))
    return "\n\n".join(parts) + "\n"


def write(folder: Path, rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> None:
    """The files for people, from all rows that there are."""
    profiled = profiled_rows(rows)
    write_csv(folder / "results.csv", rows, COLUMNS)
    write_csv(folder / "kernels.csv", [row | kernel for row in profiled for kernel in row["kernels"]], KERNEL_COLUMNS)
    write_csv(folder / "regions.csv", [line for row in profiled for line in region_lines(row)], REGION_COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment, method))


def region_lines(row: Row) -> list[Row]:
    """A row's lines of regions.csv; the share is that of the whole step."""
    everything = total_ms(row["totals"])
    return [
        {**row, "of_pass": of_pass, "region": region, "of_class": of_class, "milliseconds": time}
        | {"share": time / everything if everything else 0.0}
        for of_pass, regions in row["totals"].items()
        for region, classes in regions.items()
        for of_class, time in classes.items()
    ]


def draw(folder: Path, rows: Sequence[Row]) -> bool:
    """Plot the shares of classes, a bar for each row; True when matplotlib is there and there are any."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    bars = {
        f"{name_of(row)}: {row['mode']}": {name: row[share_column(name)] for name in CLASSES}
        for row in profiled_rows(rows)
    }
    label = "share of the work of a profiled step"
    return save_stacked_bars(folder / PLOT, bars, title="Where the time goes", parts=list(CLASSES), label=label)
