"""What is written of rows of a model's passes: one table of all, those that follow from it, and plots."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.transformer_cell import SIZES, STATISTICS, STEP, TIMED
from cs336_systems.profiling.bars import save_stacked_bars
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.plots import COLOURS, Axes, Panel, Series, save_panels
from cs336_systems.profiling.report import ABSENT, collected, environment_lines, format_number, markdown_table
from cs336_systems.profiling.steps import BACKWARD, FORWARD, PHASES
from cs336_systems.profiling.sweep import Row, Status, write_csv

IDENTITY = ("model", *SIZES, "batch", "context", "attn", "arithmetic", "compile", "mode", "warmup")
WAYS = ("attn", "arithmetic", "compile", "mode", "warmup")
"""Of the identity, what a line names beside the model and its work, where rows differ in it."""
COLUMNS = (
    *IDENTITY,
    *("parameters", "status", "reason"),
    *(f"{name}_{label}" for name in TIMED for label in (*(f"{each}_ms" for each in STATISTICS), "cv", "each_ms")),
    *("tokens_per_second", "forward_tflops", "backward_tflops", "step_tflops", "mfu", "mfu_causal", "warning"),
    *("allocated_mib", "reserved_mib", "peak_mib", "dtype", "autocast", "tf32", "steps", "first_step", "compilation"),
    *("first_step_ms", "warmup_ms", "graphs_from_cache", "graphs_compiled", "first_loss", "last_loss", "row_s", "seed"),
    *("device", "torch", "triton", "cuda", "commit", "date"),
)
METHOD = (
    "each row in a process of its own; the phases of a step are measured within that step, one after another",
    "forward: the loss, under no_grad where the mode is forward; optimizer: the gradient's norm limited, AdamW "
    "(fused), gradients dropped; step: the phases of the mode together",
    "parameters are float32; bfloat16 and float16 by autocast, without a scaler of the loss for float16, so that its "
    "gradients may overflow or vanish: times are those of a step whose scaler does nothing",
    "a row whose warm-up is 0 has its first step among the timed ones, with whatever it compiles and loads; with "
    "warm-up, compilation is in none of the times",
    "TFLOP/s and MFU: the matrix products of the model, 2 operations for each weight and token, and those of all pairs "
    "of queries and keys, as torch's FlopCounterMode counts them; twice as many backward. MFU is the part of the "
    "device's peak for the dtype of the products; of step, with the time of the update",
    "allocated after the last step, reserved from the driver, and the peak of what was allocated in the timed steps",
)
TIME_PLOT, BARS_PLOT = "step-against-context.png", "phases.png"


def write(folder: Path, rows: Sequence[Row], environment: Environment) -> None:
    """The files for people, from all rows that there are."""
    write_csv(folder / "results.csv", rows, COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment))


def report(rows: Sequence[Row], environment: Environment) -> str:
    """The tables, with what rows were measured in and how, and why some have no figure."""
    common = [_said(rows[0], name) for name in WAYS if rows and not _differs(rows, name)]
    facts = [*METHOD, *([f"all rows: {', '.join(common)}"] if common else [])]
    parts = [
        "# The time of a model's passes",
        "\n".join(environment_lines(environment)),
        "\n".join(f"- {text}" for text in facts),
        "## All rows: median ± standard deviation",
        markdown_table(_HEADERS, [_line(rows, row) for row in rows]),
    ]
    fine = [row for row in rows if row["status"] == Status.OK.value]
    tables = {
        "(forward + backward) / forward": ratios(fine),
        "float32 against other arithmetic": comparison(fine, "arithmetic", "float32"),
        "Eager against compiled": comparison(fine, "compile", "none"),
        "Attention as it is written on paper against other implementations": comparison(fine, "attn", "naive"),
        "The effect of warm-up": warming(fine),
        "Every phase": phase_statistics(fine),
    }
    parts += [f"## {title}\n\n{table}" for title, table in tables.items() if table]
    lists = {
        "Warnings": collected(f"{label(rows, row)}: {row['warning']}" for row in rows if row.get("warning")),
        "Without a figure": [
            f"{label(rows, row)}: {row['status']}: {row['reason']}" for row in rows if row["status"] != Status.OK.value
        ],
    }
    parts += [f"## {title}\n\n" + "\n".join(f"- {text}" for text in texts) for title, texts in lists.items() if texts]
    return "\n\n".join(parts) + "\n"


def label(rows: Sequence[Row], row: Row, *left_out: str) -> str:
    """A row in words: its model and work, and where rows differ in other things, these, but for some left out."""
    namesakes = [other for other in rows if other["model"] == row["model"]]
    sizes = [f"{name} {row[name]}" for name in SIZES if _differs(namesakes, name)]
    ways = [_said(row, name) for name in WAYS if name not in left_out and _differs(rows, name)]
    return ", ".join([row["model"], *sizes, f"{row['batch']} × {row['context']}", *ways])


def _said(row: Row, name: str) -> str:
    titles = {"attn": "attn ", "compile": "compile ", "warmup": "warm-up "}
    return f"{titles.get(name, '')}{row[name]}"


def _differs(rows: Sequence[Row], name: str) -> bool:
    return len({row[name] for row in rows}) > 1


_HEADERS = (
    *("model, batch × context", "parameters", "forward, ms", "backward, ms", "optimizer, ms", "step, ms"),
    *("tokens/s", "TFLOP/s", "MFU", "allocated, MiB", "reserved, MiB", "peak, MiB"),
)


def _line(rows: Sequence[Row], row: Row) -> list[str]:
    mfu = row["mfu"]
    times = [_with_deviation(row, name) for name in TIMED]
    return [
        label(rows, row),
        f"{row['parameters']:,}",
        *times[:-1],
        times[-1] if row["status"] == Status.OK.value else str(row["status"]),
        *(format_number(row[name]) for name in ("tokens_per_second", "step_tflops")),
        ABSENT if mfu is None else f"{100 * mfu:.1f} %",
        *(format_number(row.get(f"{name}_mib"), 4) for name in ("allocated", "reserved", "peak")),
    ]


def _with_deviation(row: Row, name: str) -> str:
    median = row.get(f"{name}_median_ms")
    return ABSENT if median is None else f"{format_number(median, 4)} ± {format_number(row[f'{name}_std_ms'], 2)}"


def phase_statistics(rows: Sequence[Row]) -> str:
    """Every statistic of every phase that was timed; nothing without rows."""
    lines = [
        [
            label(rows, row),
            name,
            *(format_number(row[f"{name}_{each}_ms"], 4) for each in STATISTICS),
            f"{100 * row[f'{name}_cv']:.1f} %",
        ]
        for row in rows
        for name in TIMED
        if f"{name}_mean_ms" in row
    ]
    headers = ["model, batch × context", "phase", *(f"{each}, ms" for each in STATISTICS), "std / mean"]
    return markdown_table(headers, lines) if lines else ""


def forward_backward_ms(row: Row) -> float | None:
    """The median over the steps of forward and backward together; None where there is no backward pass."""
    if f"{BACKWARD}_each_ms" not in row:
        return None
    return statistics.median(map(sum, zip(row[f"{FORWARD}_each_ms"], row[f"{BACKWARD}_each_ms"], strict=True)))


def grouped(rows: Sequence[Row], axis: str) -> list[dict[object, Row]]:
    """Rows that differ in one thing alone, by what they have of it."""
    groups: dict[tuple[object, ...], dict[object, Row]] = {}
    for row in rows:
        same = tuple(row[name] for name in IDENTITY if name != axis)
        groups.setdefault(same, {})[row[axis]] = row
    return list(groups.values())


def ratios(rows: Sequence[Row]) -> str:
    """Forward and backward over forward, by model: over that of the same steps, and over one under ``no_grad``."""
    lines = []
    for modes in grouped(rows, "mode"):
        row = modes.get("forward+backward", modes.get("step"))
        if row is None:
            continue
        alone = modes.get("forward", {}).get(f"{FORWARD}_median_ms")
        within, both = row[f"{FORWARD}_median_ms"], forward_backward_ms(row)
        times = (alone, within, row[f"{BACKWARD}_median_ms"], both)
        over = [_ratio(both, alone), _ratio(both, within)]
        lines.append([label(rows, row, "mode"), *(format_number(time, 4) for time in times), *map(format_number, over)])
    headers = ("model, batch × context", "forward, no_grad, ms", "forward, ms", "backward, ms", "both, ms")
    return markdown_table((*headers, "both / no_grad", "both / forward"), lines) if lines else ""


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None


def comparison(rows: Sequence[Row], axis: str, baseline: str) -> str:
    """Rows beside those that differ from them in one thing, where they have the baseline of it: times and memory."""
    lines = []
    for group in grouped(rows, axis):
        base = group.get(baseline)
        for value, row in group.items():
            if base is None or value == baseline:
                continue
            pairs = [
                *((base.get(f"{name}_median_ms"), row.get(f"{name}_median_ms")) for name in (FORWARD, BACKWARD)),
                (forward_backward_ms(base), forward_backward_ms(row)),
                (base[f"{STEP}_median_ms"], row[f"{STEP}_median_ms"]),
                (base["peak_mib"], row["peak_mib"]),
            ]
            lines.append([label(rows, row, axis), str(value), *(_beside(*pair) for pair in pairs)])
    headers = ["model, batch × context", f"{baseline} → …", "forward, ms", "backward, ms", "both, ms", "step, ms"]
    return markdown_table([*headers, "peak, MiB"], lines) if lines else ""


def _beside(before: float | None, after: float | None) -> str:
    ratio = _ratio(before, after)
    if ratio is None:
        return ABSENT
    return f"{format_number(before, 4)} → {format_number(after, 4)} ({format_number(ratio)} ×)"


def warming(rows: Sequence[Row]) -> str:
    """Rows that differ in their steps before the timed ones alone."""
    lines = []
    for group in grouped(rows, "warmup"):
        if len(group) < 2:
            continue
        ordered = sorted(group.values(), key=lambda row: row["warmup"])
        warmest = ordered[-1][f"{STEP}_mean_ms"]
        for row in ordered:
            names = (f"{STEP}_mean_ms", f"{STEP}_std_ms", f"{STEP}_median_ms", f"{STEP}_max_ms")
            numbers = (row["first_step_ms"], *(row[name] for name in names))
            over = _ratio(row[f"{STEP}_mean_ms"], warmest)
            lines.append(
                [
                    label(rows, row, "warmup"),
                    str(row["warmup"]),
                    *(format_number(number, 4) for number in numbers),
                    f"{100 * row[f'{STEP}_cv']:.1f} %",
                    format_number(over),
                ]
            )
    headers = [
        "model, batch × context",
        "warm-up",
        "first step of all, ms",
        "mean, ms",
        "std, ms",
        "median, ms",
        "max, ms",
    ]
    return markdown_table([*headers, "std / mean", "mean over the warmest's"], lines) if lines else ""


def draw(folder: Path, rows: Sequence[Row]) -> bool:
    """Plot the time of a step against the context, and its phases as bars; True where there was anything to draw."""
    fine = [row for row in rows if row["status"] == Status.OK.value]
    if not fine or importlib.util.find_spec("matplotlib") is None:
        return False
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in sorted(fine, key=lambda row: row["context"]):
        points = lines.setdefault(row["model"], {}).setdefault(_series(fine, row), [])
        points.append((row["context"], row[f"{STEP}_median_ms"]))
    panels = [
        Panel(model, tuple(Series(name, *map(tuple, zip(*points, strict=True))) for name, points in series.items()))
        for model, series in lines.items()
    ]
    names = dict.fromkeys(series.label for panel in panels for series in panel.series)
    # Colours and markers begin anew after so many lines; dashes then tell them apart.
    labels = {name: min(2, number // len(COLOURS)) for number, name in enumerate(names)}
    axes = Axes("context length", "ms, all phases of the mode")
    save_panels(folder / TIME_PLOT, panels, title="The time of a step", axes=axes, labels=labels)
    medians = {label(fine, row): {name: row.get(f"{name}_median_ms", 0.0) for name in PHASES} for row in fine}
    title = "The phases of a step: medians"
    return save_stacked_bars(folder / BARS_PLOT, medians, title=title, parts=PHASES, label="ms", shares=False)


def _series(rows: Sequence[Row], row: Row) -> str:
    work = [f"batch {row['batch']}"] if _differs(rows, "batch") else []
    ways = [_said(row, name) for name in WAYS if _differs(rows, name)]
    return ", ".join([*work, *ways]) or row["mode"]
