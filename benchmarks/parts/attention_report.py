"""Tables and plots of the attention benchmark, made from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from benchmarks.lib.attention_providers import GROUPS, KERNELS, KERNELS_LABEL, all_providers
from benchmarks.lib.flags import DTYPES, PASSES
from benchmarks.lib.results import Row
from benchmarks.lib.tables import line_style, markdown, matrix, new_figure, number
from cs336_systems.profiling.flops import attention_bytes, attention_memory, device_peak
from cs336_systems.profiling.memory import MIB

Figures = tuple[float, float, float]
NOTHING: Figures = (float("nan"),) * 3


class Metric(NamedTuple):
    """A column that gets a table and plots: its title, its unit, and whether its axis is logarithmic."""

    column: str
    title: str
    unit: str
    logarithmic: bool = True


METRICS = (
    Metric("median_ms", "time", "ms"),
    Metric("tflops", "rate", "TFLOP/s", False),
    Metric("speedup_over_naive", "speed-up over naive", "×"),
    Metric("speedup_over_reference", "speed-up over torch's kernel", "×", False),
    Metric("held_mib", "memory held for the backward", "MiB"),
    Metric("peak_mib", "peak memory", "MiB"),
)


def sections(frame: pd.DataFrame) -> Iterator[tuple[Metric, str, pd.DataFrame]]:
    """Each metric and pass of which there is a figure, with the rows of the pass.

    Memory held for the backward is the same for all passes that have a backward, and comes once.
    """
    for metric in METRICS:
        passes: Sequence[str] = [name for name in PASSES if name in set(frame["pass"])]
        if metric.column == "held_mib":
            passes = [name for name in passes if name != "forward"][:1]
        for which in passes:
            rows = frame[frame["pass"] == which]
            if rows[metric.column].notna().any():
                yield metric, which, rows


def tables(frame: pd.DataFrame) -> str:
    """Lengths × head dimensions of each metric, and the memory account, for each dtype and mask."""
    if "provider" not in frame:
        return ""  # no case could be measured at all
    frame = frame.dropna(subset=["provider"])  # a case that could not be measured at all has none
    parts = []
    for (dtype, mask), group in frame.groupby(["dtype", "mask"], sort=False):
        parts.append(f"## {dtype}, {mask}")
        for metric, which, rows in sections(group):
            able = list(dict.fromkeys(rows[rows["status"] != "unsupported"]["provider"]))
            rows = pd.concat([rows[rows["provider"] == name].sort_values("length", kind="stable") for name in able])
            table = matrix(rows, ["provider", "length"], "head_dim", metric.column)
            parts.append(f"### {which.capitalize()} {metric.title}, {metric.unit}\n\n{table}")
            parts += [f"The {means(rows, metric.column)}."] * (metric.unit == "×")
        parts += [f"### {title}\n\n{text}" for title, text in memory_tables(group).items()]
    return "\n\n".join(parts)


def means(rows: pd.DataFrame, column: str) -> str:
    """A line with the geometric mean of a ratio over the lengths and head dimensions, for each provider."""
    known = rows[rows[column] > 0].groupby("provider", sort=False)[column]
    texts = [f"{provider} {number(statistics.geometric_mean(ratios))} ({len(ratios)})" for provider, ratios in known]
    return f"geometric mean, × (of how many): {', '.join(texts)}"


def memory_tables(frame: pd.DataFrame) -> dict[str, str]:
    """By title, tables of the memory held for the backward, by formula and measured, of the rows of one dtype and mask.

    Only for sweeps of one batch size with as many key heads as query heads.
    """
    if frame["batch"].nunique() > 1 or (frame["heads"] != frame["kv_heads"]).any() or frame["held_mib"].isna().all():
        return {}
    shapes = frame.drop_duplicates(["length", "head_dim"]).sort_values(["length", "head_dim"], ignore_index=True)
    accounts = pd.DataFrame([account(row) for row in shapes.to_dict("records")]) / MIB
    analytic = shapes[["length", "head_dim"]].join(accounts)
    backward = frame[frame["pass"] != "forward"].drop_duplicates(["provider", "length", "head_dim"])
    kept = [_with_quadratic(row) for row in backward.to_dict("records")]
    measured = matrix(backward.assign(held=kept), ["length", "head_dim"], "provider", "held")
    text = (
        "With batch B, H heads, length N, head dimension d and s bytes per element: inputs 3·B·H·N·d·s, output "
        "B·H·N·d·s (v and the output with v's head dimension, if that is another), scores and probabilities B·H·N²·s "
        "each. Saved for the backward are the output and 3, 2, 1 or 0 tensors of N × N: scores, masked scores and "
        "probabilities; two of them; the probabilities alone; or a log-sum-exp per query, 4·B·H·N."
    )
    return {
        "Memory account, MiB": f"{text}\n\n{markdown(analytic)}",
        "Held for the backward, measured, MiB (N × N tensors)": measured,
    }


def _with_quadratic(row: dict[Any, Any]) -> str | None:
    held, sizes = row["held_mib"], account(row)
    return None if pd.isna(held) else f"{number(held)} ({(held * MIB - sizes['output']) / sizes['scores']:.1f})"


def account(row: dict[Any, Any]) -> dict[str, int]:
    """Bytes of the tensors of a row's problem, by formula."""
    width = DTYPES[row["dtype"]].itemsize
    return attention_memory(row["batch"], max(1, row["heads"]), row["length"], row["head_dim"], width, v_head_dim(row))


def v_head_dim(row: dict[Any, Any]) -> int | None:
    """The head dimension of v, if it is another than that of q; rows of older versions have no such column."""
    value: Any = row.get("v_head_dim")
    return None if pd.isna(value) else int(value)


def benchmark(
    lengths: Sequence[int], providers: Sequence[str], metric: Metric, plot_name: str = "", **fixed: Any
) -> dict[str, Any]:
    """Arguments of a `triton.testing.Benchmark` of a metric: lengths on the x axis, a line for each provider.

    Without ``plot_name``, perf_report makes its table and no plot.
    """
    groups = {provider.name: provider.group for provider in all_providers(torch.device("cpu"))}
    names = list(dict.fromkeys([*groups, *providers]))
    styles = [line_style(names.index(name), GROUPS.index(groups.get(name, "ours"))) for name in providers]
    others = any(groups.get(name) != "ours" for name in providers)
    return {
        "x_names": ["length"],
        "x_vals": list(lengths),
        "x_log": True,
        "y_log": metric.logarithmic,
        "line_arg": "provider",
        "line_vals": list(providers),
        "line_names": [KERNELS_LABEL if others and name == KERNELS else name for name in providers],
        "styles": [(style["color"], style["linestyle"]) for style in styles],
        "ylabel": metric.unit,
        "plot_name": plot_name,
        "args": {"column": metric.column, **fixed},
    }


def run_perf_report(benchmarks: Sequence[dict[str, Any]], rows_of: Callable[..., Sequence[Row]], **how: Any) -> Any:
    """Run `triton.testing.perf_report` for benchmarks of `benchmark`; None where Triton does not exist (macOS).

    Args:
        rows_of: returns the rows of a case, given its dtype, mask, head dimension and length.
        how: arguments of perf_report's ``run``.
    """
    try:
        from triton.testing import Benchmark, perf_report
    except ImportError:
        print("Triton is not installed: there are no tables and plots of perf_report.")
        return None

    def figures(length: int, provider: str, dtype: str, mask: str, head_dim: int, which: str, column: str) -> Figures:
        for row in rows_of(dtype, mask, head_dim, length):
            if (row.get("provider"), row.get("pass")) == (provider, which):
                return figures_of(row, column)
        return NOTHING

    return perf_report([Benchmark(**each) for each in benchmarks])(figures).run(**how)


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Draw every metric against length into ``folder``/plots with `triton.testing.perf_report`, and rooflines."""
    if "provider" not in frame:
        return
    frame = frame.dropna(subset=["provider"])
    draw_rooflines(frame, folder)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    benchmarks = []
    for (dtype, mask, dim), group in frame.groupby(["dtype", "mask", "head_dim"], sort=False):
        for metric, which, rows in sections(group):
            shown = rows[rows[metric.column].notna()]
            name = f"{metric.column.replace('_', '-')}-{which}-{dtype}-{mask}-d{dim}"
            fixed = {"dtype": dtype, "mask": mask, "head_dim": dim, "which": which}
            providers = list(dict.fromkeys(shown["provider"]))
            benchmarks.append(benchmark(sorted(set(shown["length"])), providers, metric, name, **fixed))
    cases = {key: rows.to_dict("records") for key, rows in frame.groupby(["dtype", "mask", "head_dim", "length"])}
    (folder / "plots").mkdir(exist_ok=True)
    with plt.rc_context({"figure.max_open_warning": 0, "axes.grid": True}):
        run_perf_report(benchmarks, lambda *sizes: cases[sizes], save_path=str(folder / "plots"))
        plt.close("all")


def figures_of(row: Row, column: str) -> Figures:
    """A row's figure for perf_report, as (value, minimum, maximum); a time has a range over its rounds."""
    value = row[column]
    if value is None or pd.isna(value):
        return NOTHING
    return (value, row["min_ms"], row["max_ms"]) if column == "median_ms" else (value, value, value)


def draw_rooflines(frame: pd.DataFrame, folder: Path) -> None:
    """Plot rates over operations per byte, under the peak rate and the memory bandwidth of the device.

    The model is of Williams, Waterman and Patterson, "Roofline", CACM 52 (2009). Bytes are those of q, k, v, the output
    and, in the backward pass, their gradients, which every implementation has to move. There is no plot for a device
    whose peak rates are unknown.
    """
    peak = device_peak(frame["device"].iloc[0])
    frame = frame.dropna(subset=["tflops"])
    if peak is None or frame.empty:
        return
    (folder / "plots").mkdir(exist_ok=True)
    for (dtype, mask, which), rows in frame.groupby(["dtype", "mask", "pass"], sort=False):
        roofs = {"float32": peak.float32, "TF32": peak.tf32} if dtype == "float32" else {dtype: peak.half}
        rows = rows.assign(intensity=[intensity(row) for row in rows.to_dict("records")]).sort_values("intensity")
        ends = [rows["intensity"].min() / 1.4, rows["intensity"].max() * 1.4]
        with new_figure(folder / "plots" / f"roofline-{which}-{dtype}-{mask}.png") as (_, axes):
            for index, (name, line) in enumerate(rows.groupby("provider", sort=False)):
                axes.plot(line["intensity"], line["tflops"], label=name, **{**line_style(index), "linestyle": ""})
            for label, rate in roofs.items():
                bends = sorted([*ends, min(max(1e3 * rate / peak.bandwidth, ends[0]), ends[1])])
                heights = [min(rate, peak.bandwidth * x / 1e3) for x in bends]
                axes.plot(bends, heights, color="black", label=f"{label} peak")
            axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
            axes.set_title(f"Roofline, {which}: {dtype}, {mask}, {rows['device'].iloc[0]}")
            axes.legend(fontsize=7)


def intensity(row: dict[Any, Any]) -> float:
    """Operations of a row's pass, as its rate counts them, per byte that the pass has to move."""
    heads, kv_heads = (max(1, row[name]) for name in ("heads", "kv_heads"))
    sizes = (row["batch"], heads, row["length"], row["length"], row["head_dim"], kv_heads)
    moved = attention_bytes(*sizes, DTYPES[row["dtype"]].itemsize, row["pass"], v_head_dim(row))
    return float(row["tflops"] * row["median_ms"] * 1e9 / moved)
