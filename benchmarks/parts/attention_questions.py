"""The tables of the pages on attention alone."""

from __future__ import annotations

import pandas as pd

from benchmarks.lib.tables import lines, markdown, with_columns
from benchmarks.parts.attention_report import memory_tables

_RIVALS = ("naive", "compiled", "flash", "torch-flash", "torch-cudnn", "torch-efficient", "tiled", "torch-math")
_MOST_RIVALS = 5
_USUAL_LENGTHS = 256
_DTYPES = ("float32", "bfloat16")


def attention(frame: pd.DataFrame) -> dict[str, str]:
    """Times of attention alone with rivals side by side; memory, measured and by formula; what does not fit."""
    frame = frame[frame["mask"] == "full"].sort_values(["length", "head_dim"])
    found, index = {}, ["length", "head_dim"]
    for dtype in _DTYPES:
        able = frame[(frame["status"] != "unsupported") & (frame["dtype"] == dtype)]
        names = [name for name in _RIVALS if name in set(able["provider"])][:_MOST_RIVALS]
        columns = {}
        for which in ("forward", "backward"):
            for name in names:
                columns[f"{which}, {name}"] = (f"provider == '{name}' and `pass` == '{which}'", "median_ms")
        found[f"Attention alone, {dtype}, without a mask, ms"] = lines(able, index, columns)
        if dtype == "float32":
            query = "provider == '{}' and `pass` == 'backward'"
            columns = {f"held, {name}": (query.format(name), "held_mib") for name in names}
            columns |= {f"peak, {name}": (query.format(name), "peak_mib") for name in names}
            found["Memory in float32, MiB"] = lines(able, index, columns)
            if "heads" in able:
                found |= memory_tables(able[able["length"] >= _USUAL_LENGTHS])
    failed = with_columns(frame[frame["status"].isin(["oom", "skipped"])], ["reason"])
    # The sentences after these say how full the memory was.
    failed["reason"] = failed["reason"].fillna("").map(lambda reason: ". ".join(reason.split(". ")[:2]))
    shown = failed[[*index, "dtype", "provider", "pass", "status", "reason"]]
    found["What has no figure"] = markdown(shown) if len(shown) else ""
    return found


def causal(frame: pd.DataFrame) -> dict[str, str]:
    """Times with a causal mask, rivals side by side, and how many times as fast as naive flash is."""
    frame, index, found = frame.sort_values(["length", "head_dim"]), ["length", "head_dim"], {}
    of_pass = {which: f"`pass` == '{which}'" for which in ("forward", "backward", "both")}
    for dtype in _DTYPES:
        rows = frame[frame["dtype"] == dtype]
        times = {
            f"{which}, {name}": (f"{query} and provider == '{name}'", "median_ms")
            for which, query in of_pass.items()
            for name in dict.fromkeys(rows["provider"])
        }
        found[f"Causal attention, {dtype}, ms"] = lines(rows, index, times)
        gains = {which: (f"{query} and provider == 'flash'", "speedup_over_naive") for which, query in of_pass.items()}
        found[f"flash, {dtype}: how many times as fast as naive"] = lines(rows, index, gains)
    return found
