"""The questions of Stanford CS336's systems assignment, and the tables that answer them, from the rows of a report.

Each has a page. What a person wrote as the answer, answers/NAME.md in the folder of the report, is shown above.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.lib.intervals import quotient
from benchmarks.lib.models import FORWARD, FORWARD_BACKWARD, NOT_COMPILED, STEP, paired
from benchmarks.lib.tables import bullets, lines, number, with_columns
from benchmarks.parts import question_plots
from benchmarks.parts.attention_questions import attention, causal
from benchmarks.parts.attention_report import means
from benchmarks.parts.breakdown_tables import short_name
from benchmarks.parts.memory_tables import LARGEST, checkpointing, complete

Tables = dict[str, str]
_MODEL = ["model", "batch", "length"]
_USUAL_BATCH = 4
_TIMED = (f"== '{FORWARD}'", f"!= '{FORWARD}'", f"== '{STEP}'")
_BUSY = 0.9
"""A forward whose kernels take a smaller share of its time is one that waits for the host."""
_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Question:
    """One page.

    Attributes:
        name: of the page's files.
        title: the question.
        parts: a regular expression that the names of the parts whose rows answer it match.
        tables: by title, from these rows.
        pictures: files of parts, as `part/file`, that the page shows too where they exist.
        rows: a query of pandas that chooses among their rows; all of them if it is empty.
        plots: draws plots of these rows into PNG files, whose names begin with a prefix.
    """

    name: str
    title: str
    parts: str
    tables: Callable[[pd.DataFrame], Tables]
    plots: Callable[[pd.DataFrame, Path], None]
    pictures: tuple[str, ...] = ()
    rows: str = ""

    def asks_for(self, part: str) -> bool:
        """Whether the rows of a part are among those that answer it."""
        return re.fullmatch(self.parts, part) is not None


def ordered(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows with models in the order of their sizes, and then in that of the columns."""
    return frame.sort_values(["parameters", *columns], kind="stable")


def with_spread(frame: pd.DataFrame, *prefixes: str) -> pd.DataFrame:
    """The rows with a column ``spread`` for each prefix of a phase: `12.3 ± 0.4`, its mean and standard deviation."""
    for prefix in prefixes:
        columns = with_columns(frame, [f"{prefix}mean_ms", f"{prefix}std_ms"])
        pairs = zip(columns[f"{prefix}mean_ms"], columns[f"{prefix}std_ms"], strict=True)
        cells = [None if pd.isna(mean) else f"{number(mean)} ± {number(std)}" for mean, std in pairs]
        frame = frame.assign(**{f"{prefix}spread": cells})
    return frame


def timing(frame: pd.DataFrame) -> Tables:
    """Forward, backward, both, and step, of each model, length and implementation of attention; and their spread."""
    # Of the modes that have forward and backward, the last with a figure counts: a step may not fit where they do.
    frame = frame.sort_values("status", key=lambda status: status == "ok", kind="stable")
    frame = ordered(frame[frame["compile"] == NOT_COMPILED], "batch", "length", "provider")
    rows = frame.to_dict("records")
    ratios = [quotient(row, row, "both_median_ms", "forward_median_ms") or (None,) * 3 for row in rows]
    ends = ("ratio", "ratio_low", "ratio_high")
    frame = frame.assign(**dict(zip(ends, map(list, zip(*ratios, strict=True)), strict=True)))
    frame = with_spread(frame, "", "both_")
    found = {}
    for dtype in _DTYPES:
        alone, trained, step = (f"dtype == '{dtype}' and mode {which}" for which in _TIMED)
        columns = {"forward, ms": (alone, "median_ms"), "backward, ms": (trained, "backward_median_ms")}
        columns |= {"both, ms": (trained, "both_median_ms"), "both / forward": (trained, "ratio")}
        columns |= {"step, ms": (step, "median_ms"), "forward, mean ± std": (alone, "spread")}
        columns |= {"both, mean ± std": (trained, "both_spread")}
        found[f"{dtype}: forward, backward, and a step with AdamW"] = lines(frame, [*_MODEL, "provider"], columns)
    large = frame[(frame["batch"] > _USUAL_BATCH) & (frame["mode"] == STEP)]
    names = ["min_ms", "median_ms", "max_ms", "cv", "tokens_per_second", "allocated_mib", "reserved_mib", "peak_mib"]
    columns = {name: ("index == index", name) for name in names}
    found["Larger batches: spread of steps, and memory"] = lines(large, [*_MODEL, "provider", "dtype"], columns)
    return found


def warm_up(frame: pd.DataFrame) -> Tables:
    """Mean and standard deviation after no warm-up, one step, two and more: of a step, and of both passes in it."""
    frame = with_spread(ordered(frame[frame["mode"] == STEP], "batch", "length"), "", "both_", "forward_")
    counts = sorted(set(frame["warmup_steps"]))
    found = {}
    for title, prefix in (("Steps", ""), ("Forward and backward", "both_"), ("Forward", "forward_")):
        columns = {"the first step, ms": ("warmup_steps == 0", "first_step_ms")} if 0 in counts and not prefix else {}
        columns |= {f"after {n}: mean ± std, ms": (f"warmup_steps == {n}", f"{prefix}spread") for n in counts}
        columns |= {f"after {n}: median": (f"warmup_steps == {n}", f"{prefix}median_ms") for n in counts}
        found[f"{title} after 0, 1, 2 and more steps of warm-up"] = lines(frame, _MODEL, columns)
    return found


def precision(frame: pd.DataFrame) -> Tables:
    """float32 against bfloat16 autocast, of each model, length and implementation of attention."""
    frame = ordered(frame[frame["compile"] == NOT_COMPILED], "batch", "length", "provider")
    named = {"median_ms": "forward, or step, ms", "both_median_ms": "forward + backward, ms", "peak_mib": "peak, MiB"}
    named |= {"tokens_per_second": "tokens/s"}
    return {"float32 → bfloat16": paired(with_columns(frame, [*named]), "dtype", "float32", named)}


def kernels(frame: pd.DataFrame) -> Tables:
    """Shares of matrix products, kernels that take longest, softmax against products, and what the profiler costs."""
    frame = ordered(with_columns(frame, ["busy"]), "length", "dtype")
    frame = frame.assign(host_bound=frame["busy"] < _BUSY)
    modes = {FORWARD: "forward", FORWARD_BACKWARD: "both", STEP: "step"}
    names = {}
    for column in ("top", "top_forward", "top_backward", "top_no_product"):
        figures_of = [f"{column}_share", f"{column}_instances"]
        each = with_columns(frame, [column, *figures_of])[[column, *figures_of]].itertuples(index=False)
        names[f"{column}_named"] = [None if pd.isna(name) else _kernel(name, *rest) for name, *rest in each]
    frame = frame.assign(**names)
    by_mode = {title: f"mode == '{mode}'" for mode, title in modes.items()}
    forward, step = by_mode["forward"], by_mode["step"]
    index = ["model", "length", "dtype"]
    shares = {f"products, {title}": (query, "share_matrix_products") for title, query in by_mode.items()}
    softmax = {"scores, ms": (forward, "scores_ms"), "softmax, ms": (forward, "softmax_ms")}
    softmax |= {"products, ms": (forward, "products_ms")}
    softmax |= {"softmax / products, time": (forward, "softmax_over_products_time")}
    softmax |= {"softmax / products, FLOPs": (forward, "softmax_over_products_flops")}
    top = {"inference, forward": (forward, "top_named"), "training, forward": (step, "top_forward_named")}
    top |= {"training, backward": (step, "top_backward_named")}
    others = {title: (query, "top_no_product_named") for title, query in by_mode.items()}
    cost = {"script, ms": (forward, "median_ms"), "profiled, ms": (forward, "profiled_ms")}
    cost |= {"its kernels, ms": (forward, "work_ms")}
    return {
        "Share of matrix products": lines(frame, index, shares),
        "Attention in the forward: softmax against both products": lines(frame, index, softmax),
        "The kernel that takes longest: its share, and how often it runs": lines(frame, index, top),
        "The same without matrix products": lines(frame, index, others),
        "The forward, timed by the script and by the profiler": lines(frame, index, cost),
    }


def _kernel(name: str, share: float, instances: float) -> str:
    count = "" if pd.isna(instances) else f", {instances:.0f} ×"
    return f"`{short_name(name)}` {share:.0%}{count}"


def memory(frame: pd.DataFrame) -> Tables:
    """Peaks by mode and dtype, and the residual stream; largest allocations; activation checkpointing."""
    frame = ordered(frame, "length")
    plain = frame[frame["recompute_every"].isna()]
    columns = {"residual stream, MiB": ("index == index", "residual_mib")}
    for mode in (FORWARD, FORWARD_BACKWARD, STEP):
        for dtype in _DTYPES:
            columns[f"{mode}, {dtype}, MiB"] = (f"mode == '{mode}' and dtype == '{dtype}'", "peak_mib")
    longest = plain[(plain["length"] == plain["length"].max()) & (plain["mode"] != FORWARD_BACKWARD)]
    largest = {name.removeprefix(LARGEST): ("index == index", name) for name in frame if name.startswith(LARGEST)}
    return {
        "Peak memory": lines(plain, _MODEL, columns),
        "Largest single allocation by category, MiB": lines(longest, [*_MODEL, "mode", "dtype"], largest),
        "Activation checkpointing": checkpointing(complete(frame[frame["status"] == "ok"])),
    }


def compilation(frame: pd.DataFrame) -> Tables:
    """Models eager and compiled, and naive attention eager and compiled."""
    models = frame[frame["compile"].notna()] if "compile" in frame else frame[:0]
    found = {}
    if len(models):
        models = ordered(models, "batch", "length", "provider")
        named = {"median_ms": "forward, or step, ms", "backward_median_ms": "backward, ms"}
        named |= {"both_median_ms": "forward + backward, ms", "peak_mib": "peak, MiB"}
        found["Models, eager → compiled"] = paired(with_columns(models, [*named]), "compile", NOT_COMPILED, named)
    alone, column = frame[frame["provider"] == "compiled"], "speedup_over_naive"
    if column in alone:
        alone = alone[alone[column].notna()].sort_values(["length", "head_dim"])
        kinds = {
            f"{dtype}, {which}": f"dtype == '{dtype}' and `pass` == '{which}'"
            for dtype in _DTYPES
            for which in ("forward", "backward")
        }
        columns = {kind: (query, column) for kind, query in kinds.items()}
        found_rows = {kind: alone.query(query) for kind, query in kinds.items()}
        average = [f"{kind}: {means(rows, column)}" for kind, rows in found_rows.items() if len(rows)]
        table = lines(alone, ["length", "head_dim"], columns)
        found["Compiled attention: how many times as fast as naive"] = table and f"{table}\n\n{bullets(average)}"
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
    Question(
        "memory",
        "Where does the memory go?",
        r"memory(-.+)?",
        memory,
        question_plots.memory,
        tuple(f"memory-2.7B/timelines/2.7B-4x512-naive-float32-compile-none-{mode}.png" for mode in (FORWARD, STEP)),
    ),
    Question(
        "attention",
        "What does attention cost, and where does memory end?",
        r"attention(-limit|-wide)?",
        attention,
        question_plots.attention,
    ),
    Question(
        "attention-causal",
        "What does FlashAttention gain where a causal mask hides half of the pairs?",
        "attention-causal",
        causal,
        question_plots.causal,
    ),
    Question(
        "compilation",
        "What does torch.compile change?",
        r"attention|transformer(-compile(-small)?)?",
        compilation,
        question_plots.compilation,
        rows="part != 'attention' or provider in ('naive', 'compiled')",
    ),
)
