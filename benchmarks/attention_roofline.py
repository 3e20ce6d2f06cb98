"""Rooflines of attention: its rate by how many operations each byte of its tensors is for, under the device's limits.

The model is of S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", Communications of the ACM 52 (2009). Bytes are those of q, k, v, the output and, in the
backward pass, their gradients, which any implementation has to move. So all stand at the same place for a length: one
that keeps scores in memory moves more, and stays below the roof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.attention_presets import DTYPES
from cs336_systems.profiling.flops import DevicePeak, attention_bytes, device_peak
from cs336_systems.profiling.plots import Axes, Panel, Roof, save_panels, series_of
from cs336_systems.profiling.sweep import Row

X_LABEL = "operations a byte"


def draw_rooflines(folder: Path, rows: Sequence[Row], labels: Mapping[str, int]) -> list[Path]:
    """Draw a PNG file for each dtype, mask and pass into `folder`, and return their paths.

    A device whose rates are not known has no roof, and gets none. ``labels`` are as `save_panels` takes them.
    """
    paths = []
    for dtype, mask, which in dict.fromkeys((row["dtype"], row["mask"], row["pass"]) for row in rows):
        shown = [row for row in rows if (row["dtype"], row["mask"], row["pass"]) == (dtype, mask, which)]
        peak = device_peak(shown[0]["device"])
        if peak is None:
            continue
        panels = [_panel(shown, dim, labels) for dim in dict.fromkeys(row["head_dim"] for row in shown)]
        path = folder / f"roofline-{which}-{dtype}-{mask}.png"
        axes = Axes(X_LABEL, "rate (TFLOP/s)", roof=roof_of(peak, dtype))
        title = f"Roofline, {which}: {dtype}, {mask}, {shown[0]['device']}"
        if save_panels(path, panels, title=title, axes=axes, labels=labels):
            paths.append(path)
    return paths


def roof_of(peak: DevicePeak, dtype: str) -> Roof:
    """What a device can reach in a dtype: in float32 by its plain units, and by its matrix units in TF32."""
    if dtype == "float32":
        return Roof({"float32": peak.float32, "TF32": peak.tf32}, peak.bandwidth)
    return Roof({dtype: peak.half}, peak.bandwidth)


def intensity(row: Row) -> float:
    """Operations of a row's pass, as its rate counts them, over the bytes that the pass has to move."""
    operations = row["tflops"] * row["median_ms"] * 1e9
    heads, kv_heads = (max(1, row[name]) for name in ("heads", "kv_heads"))
    sizes = (row["batch"], heads, row["length"], row["length"], row["head_dim"])
    return float(operations / attention_bytes(*sizes, kv_heads, DTYPES[row["dtype"]].itemsize, row["pass"]))


def _panel(rows: Sequence[Row], head_dim: int, labels: Mapping[str, int]) -> Panel:
    timed = [row for row in rows if row["head_dim"] == head_dim and row["tflops"]]
    points = ((row["implementation"], round(intensity(row), 3), row["tflops"]) for row in timed)
    return Panel(f"d {head_dim}", series_of(points, labels))
