"""Time and memory of a whole training step: forward, backward, gradient clipping and AdamW, on one device.

    python benchmarks/training_step.py                                        # every model, length and provider
    python benchmarks/training_step.py --models medium --lengths 1024 4096 --providers flash torch llama
    python benchmarks/training_step.py --models tiny --tokens 512 --compile none --device cpu

This library's model is compared with transformers' Llama, if it is installed, and with torch's attention.
docs/measuring/steps.md says what is measured, how, and what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd

from benchmarks import transformer
from benchmarks.lib import flags, harness, models
from benchmarks.lib.attention_providers import KERNELS, KERNELS_LABEL
from benchmarks.lib.intervals import figures_with_intervals, marks, quotient
from benchmarks.lib.models import AXES, LLAMA, TORCH, varying
from benchmarks.lib.tables import bullets, markdown, number, plot_lines, sections, with_columns

COMPARED = (LLAMA, TORCH)
"""The providers that others are compared with."""
_SAME_LOSS = 0.02
_TIME = ["median_ms", "low_ms", "high_ms"]
_WORK = ["model", "batch", "length", "dtype"]


_USUAL = "--batch --providers flash torch torch-cudnn naive llama --dtypes bf16 --warmup-steps 3 --tf32"
_USUAL += " --steps 10 --most-steps"
_ON_A_GPU = "--models small medium large 2.7B --lengths 512 1024 4096 16384 --tokens 16384 --compile whole"
_WITHOUT = "--models tiny --lengths 128 --tokens 512 --compile none"


def make_parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    parser = models.make_parser(__doc__, f"{_USUAL} {_ON_A_GPU if flags.wants_gpu(arguments) else _WITHOUT}")
    parser.set_defaults(modes=[models.STEP])
    return parser


def with_speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with how many times as fast they are as `COMPARED`, on the same work, by the medians.

    Compiled in the same way where there is such a row, otherwise in another.
    """
    frame, ends = with_columns(frame, [*_TIME, "first_loss"]), ("", "_low", "_high")
    same = [name for name in AXES if name != "provider"]
    for name in COMPARED:
        base = frame[(frame["provider"] == name) & frame["median_ms"].notna()]
        exact = frame[same].merge(base.drop_duplicates(same), "left")[_TIME]
        loose = frame[_WORK].merge(base.drop_duplicates(_WORK, keep="last"), "left")[_TIME]
        pairs = zip(exact.fillna(loose).to_dict("records"), frame.to_dict("records"), strict=True)
        found = [None if row["provider"] == name else quotient(base, row, "median_ms") for base, row in pairs]
        for index, end in enumerate(ends):
            frame[f"over_{name}{end}"] = [None if ratio is None else ratio[index] for ratio in found]
    return frame


def wrong_losses(frame: pd.DataFrame) -> list[str]:
    """Warnings: parameters and tokens are equal, so the first loss does not depend on what computes attention."""
    texts = []
    ours = frame[(frame["status"] == "ok") & (frame["provider"] != LLAMA)]
    for work, rows in ours.groupby(_WORK, sort=False):
        low, high = (rows.loc[index] for index in (rows["first_loss"].idxmin(), rows["first_loss"].idxmax()))
        if high["first_loss"] - low["first_loss"] > _SAME_LOSS * abs(low["first_loss"]):
            losses = " and ".join(f"{row['first_loss']:.4f} with {row['provider']}" for row in (low, high))
            texts.append(f"{' '.join(map(str, work))}: the first loss is {losses}; one of them is wrong")
    return texts


def tables(frame: pd.DataFrame) -> str:
    """One table of all rows, and warnings."""
    frame = with_speedups(frame)
    figures = ["median_ms", "std_ms", "min_ms", "host_ms", "tokens_per_second", "mfu", "mfu_causal", "peak_mib"]
    for name in COMPARED:
        frame[f"over_{name}"] = figures_with_intervals(frame, f"over_{name}")
    frame["median_ms"] = frame["median_ms"].map(number).astype(object) + marks(frame)
    figures += ["compile_s", *(f"over_{name}" for name in COMPARED), "status"]
    axes = list(dict.fromkeys([*varying(frame), "provider"]))
    providers = [f"`{name}`: {models.PROVIDERS[name]}" for name in dict.fromkeys(frame["provider"])]
    table = markdown(frame.reindex(columns=[*axes, *figures]))
    return sections({"Training steps": f"{bullets(providers)}\n\n{table}", "Losses": bullets(wrong_losses(frame))})


def plots(frame: pd.DataFrame, folder: Path) -> None:
    """Plot tokens per second over the length. This library's kernels are "ours" next to another's model."""
    frame = frame[frame["status"] == "ok"]
    if frame.empty:
        return
    lines = frame["provider"]
    if LLAMA in set(lines):
        lines = lines.replace(KERNELS, KERNELS_LABEL)
    if frame["compile"].nunique() > 1:
        lines = lines + ", compile " + frame["compile"]
    path, frame, y = folder / "tokens-per-second.png", frame.assign(line=lines), "tokens_per_second"
    plot_lines(path, frame, x="length", y=y, line="line", panel="model", title="Training steps", y_label="tokens/s")


PROGRAM = harness.Program(
    name="training_step",
    title="Training steps",
    measure=transformer.measure,
    tables=tables,
    plots=plots,
    settings=("suite", "steps", "tf32", "seed"),
    notes=(
        "{steps} consecutive steps after the warm-up, whose first step compiles",
        "float32 parameters under autocast, gradient clipping, fused AdamW",
        "MFU as in PaLM (Chowdhery et al., 2022), with all query-key pairs; mfu_causal without the masked ones",
        "over llama and torch: the ratio of the medians, with the same model, batch, length and dtype",
    ),
    memory=models.least_memory,
    packages=("transformers",),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return models.run_models(PROGRAM, make_parser(arguments), arguments)


if __name__ == "__main__":
    sys.exit(main())
