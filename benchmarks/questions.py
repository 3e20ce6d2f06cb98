"""The questions of Stanford CS336's systems assignment, and the tables that answer them, from the rows of a report.

Each has a page. What a person wrote as the answer, answers/NAME.md in the folder of the report, is shown above.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks import question_plots
from benchmarks.breakdown_tables import short_name
from benchmarks.intervals import quotient
from benchmarks.models import FORWARD, FORWARD_BACKWARD, NOT_COMPILED, STEP, paired
from benchmarks.tables import figures, markdown, number, with_columns
from cs336_systems.profiling.report import ABSENT

Tables = dict[str, str]
_MODEL = ["model", "batch", "length"]
_RIVALS = ("naive", "compiled", "flash", "torch-efficient", "tiled", "torch-math")
_MOST_RIVALS = 4
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Question:
    """One page.

    Attributes:
        name: of the page's files.
        title: the question.
        parts: a regular expression that the names of the parts whose rows answer it match.
        tables: by title, from these rows.
        rows: a query of pandas that chooses among their rows; all of them if it is empty.
        plots: draws plots of these rows into PNG files, whose names begin with a prefix.
    """

    name: str
    title: str
    parts: str
    tables: Callable[[pd.DataFrame], Tables]
    plots: Callable[[pd.DataFrame, Path], None]
    rows: str = ""

    def asks_for(self, part: str) -> bool:
        """Whether the rows of a part are among those that answer it."""
        return re.fullmatch(self.parts, part) is not None


def lines(frame: pd.DataFrame, index: Sequence[str], columns: Mapping[str, tuple[str, str]]) -> str:
    """A table with a line for each ``index``; ``columns`` have for each title a query of the rows, and a column.

    Columns without a cell are left out. Of several rows for one cell, the last counts.
    """
    cells = {}
    # Whole numbers became floats where rows of other programs lack the column.
    frame = frame.dropna(subset=[*index])
    frame = frame.astype({name: int for name in index if pd.api.types.is_float_dtype(frame[name])})
    for title, (query, column) in columns.items():
        rows = with_columns(frame, [column]).query(query).drop_duplicates([*index], keep="last")
        found = figures(rows, column).set_axis(pd.MultiIndex.from_frame(rows[[*index]]))
        if (found != ABSENT).any():
            cells[title] = found
    order = pd.MultiIndex.from_frame(frame[[*index]].drop_duplicates())
    table = pd.DataFrame(cells, order.unique()).dropna(how="all").fillna(ABSENT)
    return markdown(table.reset_index()) if cells else ""


def ordered(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows with models in the order of their sizes, and then in that of the columns."""
    return frame.sort_values(["parameters", *columns], kind="stable")


def timing(frame: pd.DataFrame) -> Tables:
    """Forward, forward and backward, and step, of each model, length and implementation of attention."""
    frame = ordered(frame[frame["compile"] == NOT_COMPILED], "batch", "length", "provider")
    rows = frame.to_dict("records")
    ratios = [quotient(row, row, "both_median_ms", "forward_median_ms") or (None,) * 3 for row in rows]
    ends = ("ratio", "ratio_low", "ratio_high")
    frame = frame.assign(**dict(zip(ends, map(list, zip(*ratios, strict=True)), strict=True)))
    columns: dict[str, tuple[str, str]] = {}
    for dtype in _DTYPES:
        alone, step = (f"dtype == '{dtype}' and mode == '{mode}'" for mode in (FORWARD, STEP))
        columns |= {f"{dtype}: forward, ms": (alone, "median_ms"), f"{dtype}: both, ms": (step, "both_median_ms")}
        columns |= {f"{dtype}: both / forward": (step, "ratio"), f"{dtype}: step, ms": (step, "median_ms")}
    return {"Forward, forward and backward, and a step with AdamW": lines(frame, [*_MODEL, "provider"], columns)}


def warm_up(frame: pd.DataFrame) -> Tables:
    """Mean and standard deviation of a step after no warm-up, one step, two and more."""
    frame = ordered(frame[frame["mode"] == STEP], "batch", "length")
    pairs = zip(frame["mean_ms"], frame["std_ms"], strict=True)
    frame = frame.assign(mean=[None if pd.isna(mean) else f"{number(mean)} ± {number(std)}" for mean, std in pairs])
    counts = sorted(set(frame["warmup_steps"]))
    columns = {f"after {count}: mean ± std, ms": (f"warmup_steps == {count}", "mean") for count in counts}
    columns |= {f"after {count}: median": (f"warmup_steps == {count}", "median_ms") for count in counts}
    cold = {"the first step, ms": ("warmup_steps == 0", "first_step_ms")} if 0 in counts else {}
    return {"Steps after 0, 1, 2 and more steps of warm-up": lines(frame, _MODEL, cold | columns)}


def precision(frame: pd.DataFrame) -> Tables:
    """float32 against bfloat16 autocast, of each model, length and implementation of attention."""
    frame = ordered(frame[frame["compile"] == NOT_COMPILED], "batch", "length", "provider")
    named = {"median_ms": "forward, or step, ms", "both_median_ms": "forward + backward, ms", "peak_mib": "peak, MiB"}
    return {"float32 → bfloat16": paired(with_columns(frame, [*named]), "dtype", "float32", named)}


def kernels(frame: pd.DataFrame) -> Tables:
    """The share of matrix products, the kernels that take longest, and softmax against attention's products."""
    frame = ordered(frame, "length", "dtype")
    modes = {FORWARD: "forward", FORWARD_BACKWARD: "both", STEP: "step"}
    names = {}
    for column in ("top", "top_no_product"):
        pairs = zip(frame[column], frame[f"{column}_share"], strict=True)
        cells = [None if pd.isna(name) else f"`{short_name(name)}` {share:.0%}" for name, share in pairs]
        names[f"{column}_named"] = cells
    frame = frame.assign(**names)
    by_mode = {title: f"mode == '{mode}'" for mode, title in modes.items()}
    index = ["model", "length", "dtype"]
    shares = {f"products, {title}": (query, "share_matrix_products") for title, query in by_mode.items()}
    ratios = {"softmax / products, time": (by_mode["forward"], "softmax_over_products_time")}
    ratios |= {"softmax / products, FLOPs": (by_mode["forward"], "softmax_over_products_flops")}
    top = {f"longest, {title}": (query, "top_named") for title, query in by_mode.items()}
    others = {f"longest without products, {title}": (query, "top_no_product_named") for title, query in by_mode.items()}
    return {
        "Share of matrix products, and softmax against attention's products": lines(frame, index, shares | ratios),
        "The kernels that take longest, with their share": lines(frame, index, top | others),
    }


def memory(frame: pd.DataFrame) -> Tables:
    """Peaks by mode and dtype, and the residual stream."""
    frame = ordered(frame[frame["recompute_every"].isna()], "length")
    columns = {"residual stream, MiB": ("index == index", "residual_mib")}
    for mode in (FORWARD, FORWARD_BACKWARD, STEP):
        for dtype in _DTYPES:
            columns[f"{mode}, {dtype}, MiB"] = (f"mode == '{mode}' and dtype == '{dtype}'", "peak_mib")
    return {"Peak memory": lines(frame, _MODEL, columns)}


def attention(frame: pd.DataFrame) -> Tables:
    """Times, held memory and status of attention alone, in float32, with rivals side by side."""
    frame = frame[(frame["dtype"] == "float32") & (frame["mask"] == "full")].sort_values(["length", "head_dim"])
    able = frame[frame["status"] != "unsupported"]
    names = [name for name in _RIVALS if name in set(able["provider"])][:_MOST_RIVALS]
    columns = {}
    for which in ("forward", "backward"):
        for name in names:
            columns[f"{which}, {name}, ms"] = (f"provider == '{name}' and `pass` == '{which}'", "median_ms")
    for name in names:
        columns[f"held, {name}, MiB"] = (f"provider == '{name}' and `pass` == 'backward'", "held_mib")
    return {"Attention alone, float32, without a mask": lines(able, ["length", "head_dim"], columns)}


def compilation(frame: pd.DataFrame) -> Tables:
    """Models eager and compiled, and naive attention eager and compiled."""
    models = frame[frame["compile"].notna()] if "compile" in frame else frame[:0]
    found = {}
    if len(models):
        models = ordered(models, "batch", "length", "provider")
        named = {
            "median_ms": "forward, or step, ms",
            "both_median_ms": "forward + backward, ms",
            "peak_mib": "peak, MiB",
        }
        found["Models, eager → compiled"] = paired(with_columns(models, [*named]), "compile", NOT_COMPILED, named)
    alone = frame[frame["provider"] == "compiled"]
    if "speedup_over_naive" in alone:
        alone = alone[alone["speedup_over_naive"].notna()].sort_values(["length", "head_dim"])
        kinds = [(dtype, which) for dtype in _DTYPES for which in ("forward", "backward")]
        columns = {
            f"{dtype}, {which}": (f"dtype == '{dtype}' and `pass` == '{which}'", "speedup_over_naive")
            for dtype, which in kinds
        }
        found["Compiled attention: how many times as fast as naive"] = lines(alone, ["length", "head_dim"], columns)
    return found


QUESTIONS = (
    Question(
        "timing",
        "How long do the forward, the backward and a step take?",
        r"transformer|transformer-(small|medium|large|xl|2\.7B|10B|wide|own|limit|batch-\d+)",
        timing,
        question_plots.timing,
    ),
    Question("warm-up", "What does warm-up change?", "transformer-warmup", warm_up, question_plots.warm_up),
    Question(
        "mixed-precision",
        "What does mixed precision change?",
        r"transformer|transformer-(small|medium|large|xl|2\.7B|10B|wide|batch-\d+)",
        precision,
        question_plots.precision,
    ),
    Question("kernels", "Which kernels take the time?", r"breakdown(-.+)?", kernels, question_plots.kernels),
    Question("memory", "Where does the memory go?", r"memory(-.+)?", memory, question_plots.memory),
    Question(
        "attention",
        "What does attention cost, and where does memory end?",
        r"attention(-limit|-wide)?",
        attention,
        question_plots.attention,
    ),
    Question(
        "compilation",
        "What does torch.compile change?",
        r"attention|transformer-compile(-small)?",
        compilation,
        question_plots.compilation,
        "part != 'attention' or provider in ('naive', 'compiled')",
    ),
)
