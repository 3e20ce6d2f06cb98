"""Figures, tables and plots of the kernels of a step, for breakdown.py."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd

from benchmarks.lib.harness import Row
from benchmarks.lib.models import (
    FORWARD,
    FORWARD_BACKWARD,
    PHASES,
    PHASES_OF,
    STEP,
    ModelCase,
    file_of,
    paired,
    varying,
)
from benchmarks.lib.tables import markdown, plot_bars, sections, with_columns
from cs336_systems.profiling import time_by
from cs336_systems.profiling.flops import Pass, naive_attention_flops
from cs336_systems.profiling.kernel_classes import CLASSES, MATMUL, OTHER
from cs336_systems.profiling.regions import ATTENTION_STEPS, SCORES, SOFTMAX, VALUES

PASS_OF: dict[str, Pass] = {FORWARD: "forward", FORWARD_BACKWARD: "both", STEP: "both"}
ATTENTION = {region: region.removeprefix("attention: ") for region in ATTENTION_STEPS}
"""By region, the prefix of its columns."""
_MOST_KERNELS, _MOST_OTHERS = 10, 5
_LONGEST_NAME = 80
_APPLIED = re.compile(r"\b(cutlass_\w+|\w*(?:[Ff]unctor|_kernel_cuda|_kernel_impl|_kernel)\w*)\b")
_WRAPPERS = ("gpu_kernel_impl", "gpu_kernel_impl_nocast", "AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor")
_OF_A_TOP = {"share": "share", "ms": "milliseconds", "instances": "instances"}
"""By suffix, the columns of a top kernel and where they come from."""
_PAIRED = {"median_ms": "median, ms", "scores_ms": "scores, ms", "softmax_ms": "softmax, ms", "values_ms": "values, ms"}
_STATISTICS = ["milliseconds", "share", "instances", "mean_us", "median_us", "min_us", "max_us", "std_us"]


def share_column(kernel_class: str) -> str:
    """The column of a class: `share_matrix_products`."""
    return f"share_{kernel_class.replace(' ', '_')}"


def kernel_columns(calls: pd.DataFrame, case: ModelCase, *, steps: int) -> Row:
    """The columns of a row, from the calls of a trace: work, shares of classes, top kernels, and attention's steps."""
    by_class = time_by(calls, "kernel_class", steps=steps)
    row: Row = {
        "measured": "kernels on the device" if calls["on_device"].any() else "operators on the host",
        "work_ms": by_class["milliseconds"].sum(),
        "instances": by_class["instances"].sum(),
        **{share_column(name): float(by_class["share"].get(name, 0.0)) for name in CLASSES},
    }
    parts = {"top": calls, "top_no_product": calls[calls["kernel_class"] != MATMUL]}
    for phase in PHASES_OF[case.mode]:
        part = parts[f"top_{phase}"] = calls[calls["phase"] == phase]
        shares = time_by(part, "kernel_class", steps=steps)["share"]
        row[f"{share_column(MATMUL)}_{phase}"] = float(shares.get(MATMUL, 0.0))
    for column, part in parts.items():
        names = time_by(part, "name", steps=steps)
        row[column] = None if names.empty else str(names.index[0])
        for suffix, statistic in _OF_A_TOP.items():
            row[f"{column}_{suffix}"] = None if names.empty else float(names[statistic].iloc[0])
    return row | attention_columns(calls, case, steps=steps)


def attention_columns(calls: pd.DataFrame, case: ModelCase, *, steps: int) -> Row:
    """Times and FLOPs of the steps of naive attention, and softmax over both products; {} for other attention.

    The ratio of times is that of softmax's region to the products' kernels, without what else is in their regions.
    """
    times = time_by(calls, ["region", "kernel_class"], steps=steps)["milliseconds"]
    by_region = times.groupby("region").sum()
    if SOFTMAX not in by_region.index:
        return {}
    config, which = case.config, PASS_OF[case.mode]
    flops = naive_attention_flops(case.batch, config.num_heads, case.length, case.length, config.d_head, which=which)
    products = sum(float(times.get((region, MATMUL), 0.0)) for region in (SCORES, VALUES))
    return {
        **{f"{name}_ms": float(by_region.get(region, 0.0)) for region, name in ATTENTION.items()},
        **{f"{name}_flops": config.num_layers * flops[name] for name in ATTENTION.values()},
        "products_ms": products,
        "softmax_over_products_time": float(by_region[SOFTMAX]) / products if products else None,
        "softmax_over_products_flops": flops["softmax"] / (flops["scores"] + flops["values"]),
    }


def details(calls: pd.DataFrame, case: ModelCase, *, steps: int) -> dict[str, pd.DataFrame | str]:
    """By folder, the files of a case: every kernel and region as CSV, and the longest in Markdown."""
    kernels = time_by(calls, ["name", "kernel_class"], steps=steps)
    regions = time_by(calls, ["region", "phase"], steps=steps)["milliseconds"].unstack(fill_value=0.0)
    regions = regions.assign(ms=regions.sum(axis=1)).sort_values("ms", ascending=False)
    regions = regions.assign(share=regions["ms"] / regions["ms"].sum())
    classes = kernels.index.get_level_values("kernel_class")
    others, unknown = kernels[classes != MATMUL], kernels[classes == OTHER].index.get_level_values("name")
    text = sections(
        {
            "Regions, ms of a step": markdown(regions.reset_index()),
            "Kernels that take longest": kernel_table(kernels.head(_MOST_KERNELS)),
            "Kernels that take longest, without matrix products": kernel_table(others.head(_MOST_OTHERS)),
            "Kernels without a class": ", ".join(f"`{short_name(name)}`" for name in unknown),
        }
    )
    return {
        "details": f"# {case.name}\n\n{text}\n",
        "kernels": time_by(calls, ["phase", "name", "kernel_class"], steps=steps),
        "regions": time_by(calls, ["phase", "region", "kernel_class"], steps=steps),
    }


def profiled_columns(
    calls: pd.DataFrame, case: ModelCase, *, steps: int, ms: float, unprofiled_ms: float, out: Path
) -> Row:
    """The columns of a profiled case, of which a step took ``ms``; writes the files of `details` into ``out``."""
    row: Row = {"profiled_ms": ms, "profiler_cost": ms / unprofiled_ms} | kernel_columns(calls, case, steps=steps)
    row["busy"] = row["work_ms"] / unprofiled_ms if calls["on_device"].any() else None
    for name, table in details(calls, case, steps=steps).items():
        suffix, text = ("csv", table.to_csv()) if isinstance(table, pd.DataFrame) else ("md", table)
        file_of(out, name, case, suffix).write_text(text, encoding="utf-8")
    return row


def kernel_table(kernels: pd.DataFrame) -> str:
    """Kernels with their statistics."""
    table = kernels[_STATISTICS].reset_index()
    return markdown(table.assign(name=table["name"].map(short_name)))


def short_name(name: str) -> str:
    """A kernel's name without namespaces and arguments; of those of its template, the function that it applies.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, ...>(...)`` becomes
    ``vectorized_elementwise_kernel<CUDAFunctor_add>``.
    """
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    head, *_ = re.split(r"[<(]", name, maxsplit=1)
    applied = [found for found in _APPLIED.findall(name[len(head) :]) if found not in _WRAPPERS]
    # cuBLAS's names go on with stages and alignments.
    head = re.sub(r"(_tilesize\w+?)_stage\w*", r"\1", head.strip().rpartition("::")[2])
    return f"{head}<{applied[0]}>" if applied else head[:_LONGEST_NAME]


def tables(frame: pd.DataFrame) -> str:
    """Times with and without the profiler, shares of classes and products, top kernels, and attention's steps."""
    axes = [*dict.fromkeys([*varying(frame), "mode"])]
    times = ["median_ms", "std_ms", "min_ms", "max_ms", "profiled_ms", "profiler_cost", "work_ms", "busy", "instances"]
    parts = {"Times without and with the profiler": markdown(frame.reindex(columns=[*axes, *times, "status"]))}
    if "work_ms" not in frame or frame["work_ms"].isna().all():
        return sections(parts)
    frame = frame[frame["work_ms"].notna()]
    shares = [name for name in CLASSES if frame[share_column(name)].any()]
    by_class = frame[[*axes, *map(share_column, shares)]].rename(columns={share_column(name): name for name in shares})
    product = share_column(MATMUL)
    products = frame.reindex(columns=[*axes, product, *(f"{product}_{phase}" for phase in PHASES)])
    parts["Share of each class of kernels, profiled"] = markdown(by_class)
    parts["Share of matrix products, profiled"] = markdown(products.rename(columns={product: "all phases"}))
    parts["Top kernel of each phase, and of the step without matrix products, profiled"] = markdown(
        top_kernels(frame, axes)
    )
    title = "float32 and other dtypes: the step, and steps of naive attention, profiled"
    parts[title] = paired(with_columns(frame, [*_PAIRED]), "dtype", "float32", _PAIRED)
    if "softmax_ms" in frame:
        # The columns of `attention_columns`.
        columns = frame.filter(regex=f"^({'|'.join([*ATTENTION.values(), 'products'])})_")
        steps = frame[axes].join(columns).dropna(subset=["softmax_ms"])
        parts["Steps of naive attention, profiled"] = markdown(steps)
    return sections(parts)


def top_kernels(frame: pd.DataFrame, axes: list[str]) -> pd.DataFrame:
    """For each row, the kernel with the most time of each phase, and of the step without matrix products.

    Its share is that of the time of these kernels; its time and instances are those of a step.
    """
    lines = []
    for row in frame.to_dict("records"):
        tops = {phase: f"top_{phase}" for phase in PHASES_OF[row["mode"]]} | {"step without products": "top_no_product"}
        for phase, column in tops.items():
            kernel = None if pd.isna(row[column]) else short_name(row[column])
            figures = {suffix: row.get(f"{column}_{suffix}") for suffix in _OF_A_TOP}
            lines.append({**{name: row[name] for name in axes}, "phase": phase, "kernel": kernel, **figures})
    return pd.DataFrame(lines)


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot the shares of the classes, a bar for each row."""
    if "work_ms" in frame:
        shares = frame.dropna(subset=["work_ms"]).set_index("case")[[share_column(name) for name in CLASSES]]
        shares.columns = pd.Index(CLASSES)
        label = "share of the work of a profiled step"
        plot_bars(folder / "shares.png", shares, title="Where the time goes", label=label)
