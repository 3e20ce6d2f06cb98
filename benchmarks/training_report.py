"""Rows of the benchmark of training steps, the figures that follow from them, and the tables for people."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.attention_providers import KERNELS_LABEL
from benchmarks.training_cell import Cell
from benchmarks.training_models import FLASH, LLAMA, MODELS, SDPA
from cs336_systems.profiling.environment import Environment
from cs336_systems.profiling.flops import device_peak
from cs336_systems.profiling.memory import GIB
from cs336_systems.profiling.plots import Axes, Panel, save_panels, series_of
from cs336_systems.profiling.report import ABSENT, format_number, markdown_table, report_page, several_commits
from cs336_systems.profiling.sweep import Row, Status, write_csv
from cs336_systems.transformer import TransformerConfig

COLUMNS = (
    *("preset", "suite", "vocab_size", "context", "batch", "model", "compile", "status", "reason", "median_ms"),
    *("mean_ms", "std_ms", "min_ms", "step_ms", "host_ms", "tokens_per_second", "mfu", "mfu_causal", "peak_gib"),
    *("compile_s", "graphs_from_cache", "graphs_compiled", "row_s", "over_llama", "over_sdpa", "parameters"),
    *("first_loss", "last_loss", "dtype", "tf32", "device", "commit", "date"),
)
DTYPE = "bfloat16 autocast"
PLOT = "tokens-per-second.png"

_SAME_LOSS = 0.02
"""Relative: first losses of one model, in bfloat16 and by whatever kernels, are much closer than this."""


def flops_per_token(config: TransformerConfig) -> float:
    """6 N + 12 L d_model T: operations of a training step for each token of sequences of T, the context length.

    N is the number of parameters without the embedding's table, which is looked up, and L that of layers. Every pair of
    a query and a key counts, as in Chowdhery et al., "PaLM" (2022), also those that a causal mask hides:
    `TransformerConfig.training_flops_per_token` leaves these out.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    attention = 12 * config.num_layers * config.d_model * config.context_length
    return float(6 * (config.parameters() - looked_up) + attention)


def utilisation(flops: float, tokens_per_second: float, device_name: str, processes: int = 1) -> float | None:
    """The part of the devices' bfloat16 peak that so many operations a token are; None where the peak is not known."""
    peak = device_peak(device_name)
    return None if peak is None else flops * tokens_per_second / (peak.half * 1e12 * processes)


def rates_of(
    config: TransformerConfig, tokens: int, row: Mapping[str, object], device_name: str, processes: int = 1
) -> Row:
    """The columns that follow from a step's time and tokens; None where there is none."""
    peak_bytes, median_ms = row.get("peak_bytes"), row.get("median_ms")
    rate = tokens / median_ms * 1e3 if isinstance(median_ms, float) else None

    def part(flops: float) -> float | None:
        return None if rate is None else utilisation(flops, rate, device_name, processes)

    return {
        "tokens_per_second": rate,
        "mfu": part(flops_per_token(config)),
        "mfu_causal": part(config.training_flops_per_token()),
        "peak_gib": peak_bytes / GIB if isinstance(peak_bytes, int) else None,
        "parameters": config.parameters(),
        "dtype": DTYPE,
    }


def row_of(cell: Cell, measured: Row, tf32: bool, device_name: str) -> Row:
    """The row of a cell, from what its process returned."""
    return {
        "preset": cell.preset,
        "suite": cell.suite,
        "vocab_size": cell.vocab_size,
        "context": cell.context,
        "batch": cell.batch,
        "model": cell.model,
        "compile": cell.compiles,
        **measured,
        **rates_of(cell.config, cell.batch * cell.context, measured, device_name),
        "tf32": tf32,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with how many times as fast they are as Llama, and as torch's attention, on the same work."""
    return [
        row | {f"over_{name}": _ratio(row, _other(rows, row, name)) for name in (LLAMA, SDPA) if row["model"] != name}
        for row in rows
    ]


def _work(row: Row) -> tuple[object, ...]:
    return tuple(row[name] for name in ("preset", "suite", "vocab_size", "context", "batch"))


def _other(rows: Iterable[Row], row: Row, model: str) -> Row:
    """That model's row of the same work; compiled as this one where there are several, else as it was."""
    same = [other for other in rows if other["model"] == model and _work(other) == _work(row)]
    return next((other for other in same if other["compile"] == row["compile"]), same[-1] if same else {})


def _ratio(row: Row, other: Row) -> float | None:
    mine, theirs = row.get("median_ms"), other.get("median_ms")
    return theirs / mine if mine and theirs else None


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be: one model, from one seed, has one first loss whatever computes its attention."""
    texts = []
    ours = [row for row in rows if row["model"] != LLAMA and row["status"] == Status.OK.value]
    for work in dict.fromkeys(map(_work, ours)):
        same = [row for row in ours if _work(row) == work]
        least, most = (pick(same, key=lambda row: row["first_loss"]) for pick in (min, max))
        if most["first_loss"] - least["first_loss"] > _SAME_LOSS * abs(least["first_loss"]):
            losses = " and ".join(f"{row['first_loss']:.4f} with {row['model']}" for row in (least, most))
            texts.append(f"{work[0]}, {work[4]} × {work[3]}: the first loss is {losses}; one of them is wrong")
    return texts


_HEADERS = (
    *("preset, batch × context, model", "compile", "step, ms", "± std", "mean", "min", "host, ms", "tokens/s", "MFU"),
    *("peak, GiB", "compiling, s", "row, s", "over llama, ×", "over sdpa, ×"),
)


def line_of(row: Row) -> list[str]:
    """A row as a line of the table; without a figure it has its status."""
    numbers = ("std_ms", "mean_ms", "min_ms", "host_ms", "tokens_per_second")
    mfu = row.get("mfu")
    return [
        f"{row['preset']}, {row['batch']} × {row['context']}, {row['model']}",
        row["compile"],
        format_number(row["median_ms"], 4) if row["status"] == Status.OK.value else row["status"],
        *(format_number(row.get(name)) for name in numbers),
        ABSENT if mfu is None else f"{100 * mfu:.1f} %",
        *(format_number(row.get(name)) for name in ("peak_gib", "compile_s", "row_s", "over_llama", "over_sdpa")),
    ]


def report(rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> str:
    """The table, with what it was measured in and how, and why some rows have no figure."""
    rows = with_ratios(rows)
    reasons = [
        f"{row['preset']}, {row['batch']} × {row['context']}, {row['model']}: {row['status']}: {row['reason']}"
        for row in rows
        if row["status"] != Status.OK.value
    ]
    models = [f"- `{name}`: {what}" for name, what in MODELS.items() if any(row["model"] == name for row in rows)]
    models += [f"- in the plot: `{name}` is {label}" for name, label in _plot_names(rows).items()]
    parts = ["\n".join(models), several_commits(rows), markdown_table(_HEADERS, [line_of(row) for row in rows])]
    return report_page("Training steps", environment, method, parts, warned=warnings_of(rows), reasons=reasons)


def write(folder: Path, rows: Sequence[Row], environment: Environment, method: Sequence[str]) -> None:
    """The files for people, from all rows that there are."""
    write_csv(folder / "results.csv", with_ratios(rows), COLUMNS)
    (folder / "tables.md").write_text(report(rows, environment, method))


def _plot_names(rows: Sequence[Row]) -> dict[str, str]:
    """The label of this library's model with its kernels, by its name, where the rows time another library's model."""
    models = {row["model"] for row in rows if row["status"] == Status.OK.value}
    return {FLASH: KERNELS_LABEL} if {FLASH, LLAMA} <= models else {}


def draw(folder: Path, rows: Sequence[Row]) -> bool:
    """Plot the rates against the context, a panel for each preset; True when matplotlib is there and there are any.

    Where the rows have Llama, this library's model with its kernels has the label "ours".
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    fine = [row for row in rows if row["status"] == Status.OK.value]
    # A model that was compiled in several ways has a line for each.
    found = dict.fromkeys((row["model"], row["compile"]) for row in fine)
    ways = sorted(found, key=lambda way: [*MODELS].index(way[0]))
    several = Counter(model for model, _ in ways)
    names = _plot_names(rows)
    labels = {
        (model, how): f"{names.get(model, model)}{'' if several[model] == 1 else f', compile {how}'}"
        for model, how in ways
    }
    panels = []
    for preset in dict.fromkeys(row["preset"] for row in fine):
        mine = [row for row in fine if row["preset"] == preset]
        points = ((labels[row["model"], row["compile"]], row["context"], row["tokens_per_second"]) for row in mine)
        panels.append(Panel(preset, series_of(points, labels.values())))
    groups = {label: int(model == LLAMA) for (model, _), label in labels.items()}
    axes = Axes("context length", "tokens/s")
    return save_panels(folder / PLOT, panels, title="Training steps", axes=axes, labels=groups)
