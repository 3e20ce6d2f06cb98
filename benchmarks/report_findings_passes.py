"""What the figures of a model's passes say, in sentences made of the rows of results.csv: see `report_findings`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from benchmarks.report_rows import Line, NotMeasuredError, Rows, fine, grouped, of, pairs, spread, spreads
from cs336_systems.profiling.report import format_number

_MODEL = ("model", "batch", "context")
_SERIES = (*_MODEL, "attn", "arithmetic", "compile", "mode", "warmup")
_COMPILED = {"model": "a compiled model", "blocks": "a model of compiled blocks"}
_FREE = 1.1
"""Times as long for twice the tokens, below which they are taken to cost nothing."""


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in _SERIES if name not in names)


def _steady(rows: Sequence[Line]) -> list[Line]:
    """Those without their first step among the timed ones, which compiles. Raises NotMeasuredError when none is."""
    found = [row for row in rows if row.get("warmup") != "0"]
    if not found:
        raise NotMeasuredError("every row counts its first step")
    return found


def backward_over_forward(rows: Rows) -> str:
    """How many times as long as the forward pass the backward takes, by model."""
    timed = _steady(fine(rows, "forward_median_ms", "backward_median_ms", "model"))
    ratios = spreads(timed, "model", lambda row: of(row, "backward_median_ms") / of(row, "forward_median_ms"))
    said = "; ".join(f"{model} {some}" for model, some in ratios)
    return f"The backward pass takes so many times as long as the forward pass: {said}."


def warm_up(rows: Rows) -> str:
    """What the steps before the timed ones change."""
    timed = fine(rows, "warmup", "step_mean_ms", "step_std_ms")
    most = max({row["warmup"] for row in timed}, key=int)
    if most == "0":
        raise NotMeasuredError("no row has warm-up")
    found = pairs(timed, "warmup", "0", most, _without("warmup"))
    means = [of(cold, "step_mean_ms") / of(warm, "step_mean_ms") for cold, warm in found]
    cold, warm = ([of(pair[i], "step_std_ms") / of(pair[i], "step_mean_ms") * 100 for pair in found] for i in (0, 1))
    return (
        f"Without warm-up the mean of a step is {spread(means)} times what it is with {most} before it that are not "
        f"timed, and the standard deviation {spread(cold, 2)} % of the mean in place of {spread(warm, 2)} %."
    )


def half_pays(rows: Rows) -> str:
    """Where bfloat16 autocast is faster than float32, and by how much."""
    return _pays(rows, "arithmetic", "float32", "bfloat16", "bfloat16 autocast", "float32")


def compile_pays(rows: Rows) -> str:
    """Where a compiled model is faster than an eager one, and by how much, for each way of compiling it."""
    timed = fine(rows, "compile", "step_median_ms", *_MODEL)
    ways = [way for way in _COMPILED if any(row["compile"] == way for row in timed)]
    if not ways:
        raise NotMeasuredError("no row is of a compiled model")
    return " ".join(_pays(rows, "compile", "none", way, _COMPILED[way], "an eager one") for way in ways)


def _pays(rows: Rows, axis: str, plain: str, other: str, named: str, beside: str) -> str:
    timed = _steady(fine(rows, axis, "step_median_ms", *_MODEL))
    found = [
        (of(a, "step_median_ms") / of(b, "step_median_ms"), b)
        for a, b in pairs(timed, axis, plain, other, _without(axis))
    ]
    by_context: dict[str, list[float]] = {}
    for ratio, row in sorted(found, key=lambda one: int(one[1]["context"])):
        by_context.setdefault(row["context"], []).append(ratio)
    said = "; ".join(f"{spread(ratios)} at a context of {context}" for context, ratios in by_context.items())
    best, worst = (pick(found, key=lambda one: one[0]) for pick in (max, min))
    return (
        f"Of {len(found)} compared, {named} is faster than {beside} in {sum(ratio > 1 for ratio, _ in found)}. "
        f"It is so many times as fast: {said}; "
        f"most, {format_number(best[0])}, with {_name(best[1], axis)}; "
        f"least, {format_number(worst[0])}, with {_name(worst[1], axis)}."
    )


def _name(row: Line, axis: str) -> str:
    other = row.get("arithmetic") if axis == "compile" else f"compile {row.get('compile') or 'none'}"
    return ", ".join(
        name for name in (row["model"], f"{row['batch']} × {row['context']}", other, row.get("mode") or "step") if name
    )


def length_is_free(rows: Rows) -> str:
    """Where a step of twice the tokens takes as long, so that its operations do not decide the time."""
    timed = _steady(fine(rows, "step_median_ms", "arithmetic", *_MODEL))
    found: dict[str, list[bool]] = {}
    for series in grouped(timed, _without("context")):
        ordered = sorted(series, key=lambda row: int(row["context"]))
        for short, long in pairwise(ordered):
            if int(long["context"]) >= 2 * int(short["context"]):
                free = of(long, "step_median_ms") < _FREE * of(short, "step_median_ms")
                found.setdefault(long["arithmetic"], []).append(free)
    if not found:
        raise NotMeasuredError("no two rows differ in context alone")
    said = "; ".join(f"{sum(free)} of {len(free)} in {arithmetic}" for arithmetic, free in found.items())
    return (
        f"At twice the length or more a step takes less than {_FREE} times as long: {said}. There the number of "
        "operations does not decide the time, and neither the dtype nor the length shows what it costs."
    )
