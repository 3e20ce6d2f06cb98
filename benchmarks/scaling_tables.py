"""Tables of scaling.py: steps compared with one process, and the longest sequences that fit."""

from __future__ import annotations

import pandas as pd

from benchmarks.models import sections, varying
from benchmarks.scaling_process import LONGEST, STEP, STRONG
from benchmarks.tables import bullets, markdown
from cs336_systems.parallel.layout import NONE

_SAME = ["model", "suite", "vocab_size", "length", "batch", "compile", "warmup_steps", "recompute_every", "loss_chunk"]
_SAME_LOSS = 0.01
_FIGURES = ["median_ms", "std_ms", "tokens_per_second", "mfu", "peak_mib", "compile_s", "first_loss"]


def tables(frame: pd.DataFrame) -> str:
    """Timed steps, searches for the longest sequence, and warnings."""
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_FIGURES])))
    steps = with_efficiency(frame[frame["what"] == STEP])
    axes = ["model", "sequences", "step_length", "scale", "parallel", "processes"]
    figures = [*_FIGURES[:3], "efficiency", "work_efficiency", *_FIGURES[3:6]]
    others = [name for name in varying(frame, _SAME[5:]) if name not in axes]
    return sections(
        {
            "Steps": markdown(steps[[*axes, *others, *figures, "status"]]) if len(steps) else "",
            "Longest sequence that fits": longest(frame[frame["what"] == LONGEST]),
            "Losses": bullets(wrong_losses(steps)),
        }
    )


def with_efficiency(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with ``efficiency``, tokens per second over n times those of one process with the work of one, and
    ``work_efficiency``, the same with FLOPs per second.

    n processes that are n times as fast have an efficiency of 1. Tokens of longer sequences need more FLOPs.
    """
    one = frame[frame["parallel"] == NONE].drop_duplicates(_SAME)
    base = frame[_SAME].merge(one, "left", _SAME).set_index(frame.index)
    efficiency = frame["tokens_per_second"] / (frame["processes"] * base["tokens_per_second"])
    work = efficiency * frame["flops_per_token"] / base["flops_per_token"]
    return frame.assign(efficiency=efficiency, work_efficiency=work, loss_of_one=base["first_loss"])


def wrong_losses(frame: pd.DataFrame) -> list[str]:
    """Warnings: with --scale strong all have the same tokens and parameters, and so the same first loss."""
    strong = frame[(frame["scale"] == STRONG) & ((frame["first_loss"] / frame["loss_of_one"] - 1).abs() > _SAME_LOSS)]
    return [
        f"{row['case']}: the first loss is {row['first_loss']:.4f}, and {row['loss_of_one']:.4f} on one process; "
        "one of them is wrong"
        for row in strong.to_dict("records")
    ]


def longest(frame: pd.DataFrame) -> str:
    """For each mode and number of processes the longest length that fitted, and the shortest that did not."""
    axes = ["model", "suite", "vocab_size", "compile", "recompute_every", "loss_chunk", "parallel", "processes"]
    lines = []
    for key, rows in frame.groupby(axes, sort=False, dropna=False):
        fits, fails = rows[rows["status"] == "ok"], rows[rows["status"] != "ok"]
        line = dict(zip(axes, key, strict=True))
        if len(fits):
            best = fits.loc[fits["step_length"].idxmax()]
            line |= {"longest": best["step_length"], "peak_mib": best["peak_mib"], "step_s": best["median_ms"] / 1e3}
        if len(fails):
            worst = fails.loc[fails["step_length"].idxmin()]
            line["did not fit"] = f"{worst['step_length']} ({worst['status']})"
        lines.append(line)
    if not lines:
        return ""
    table = pd.DataFrame(lines).reindex(columns=[*axes, "longest", "peak_mib", "step_s", "did not fit"])
    one = table[table["parallel"] == NONE].drop_duplicates(axes[:-2])
    base = table[axes[:-2]].merge(one, "left", axes[:-2])["longest"]
    ratio = table["longest"] / base
    shown = [
        name for name in axes if name in ("model", "parallel", "processes") or table[name].nunique(dropna=False) > 1
    ]
    text = ["–" if pd.isna(value) else f"{int(value):,}" for value in table["longest"]]
    return markdown(
        table[shown].assign(longest=text, over_one=ratio).join(table[["peak_mib", "step_s", "did not fit"]])
    )
