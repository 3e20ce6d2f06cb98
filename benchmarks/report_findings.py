"""What the figures of a report say, in sentences made of the rows of results.csv.

Each function answers a question from the rows of a program. It raises `NotMeasuredError` where they cannot answer it,
with the reason, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.report_findings_attention import (
    attention_fastest,
    attention_growth,
    attention_half,
    attention_ratio,
)
from benchmarks.report_rows import (
    NotMeasuredError,
    Rows,
    column_of,
    fine,
    grouped,
    of,
    pairs,
    powers_of,
    spread,
)
from cs336_systems.profiling.report import format_number

Answer = Callable[[Rows], str]


def statements(answers: Mapping[str, Answer], rows: Rows) -> list[tuple[str, str]]:
    """Each question with its answer, or with why there is none."""
    return [(question, answered(answer, rows)) for question, answer in answers.items()]


def answered(answer: Answer, rows: Rows) -> str:
    """An answer, or that this was not measured, and why."""
    try:
        return answer(rows)
    except NotMeasuredError as reason:
        return f"not measured: {reason}"


MODEL = ("model", "batch", "context")
_COMPILED = {"model": "a compiled model", "blocks": "a model of compiled blocks"}
_NEARLY_ALL = 0.9
_SERIES = (*MODEL, "attn", "arithmetic", "compile", "mode", "warmup")


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in _SERIES if name not in names)


def backward_over_forward(rows: Rows) -> str:
    """How many times as long as the forward pass the backward takes, by model."""
    timed = fine(rows, "forward_median_ms", "backward_median_ms", "model")
    # A first step that compiles says nothing of the ratio.
    steady = [row for row in timed if row.get("warmup") != "0"]
    if not steady:
        raise NotMeasuredError("every row counts its first step")
    said = []
    for model in dict.fromkeys(row["model"] for row in steady):
        same = [row for row in steady if row["model"] == model]
        ratios = [of(row, "backward_median_ms") / of(row, "forward_median_ms") for row in same]
        said.append(f"{model} {spread(ratios)}")
    return f"The backward pass takes so many times as long as the forward pass: {'; '.join(said)}."


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
    timed = fine(rows, "compile", "step_median_ms", *MODEL)
    ways = [way for way in _COMPILED if any(row["compile"] == way for row in timed)]
    if not ways:
        raise NotMeasuredError("no row is of a compiled model")
    return " ".join(_pays(rows, "compile", "none", way, _COMPILED[way], "an eager one") for way in ways)


def _pays(rows: Rows, axis: str, plain: str, other: str, named: str, beside: str) -> str:
    timed = fine(rows, axis, "step_median_ms", *MODEL)
    found = pairs(timed, axis, plain, other, _without(axis))
    ratios = {
        f"{b['model']}, {b['batch']} × {b['context']}, {b.get('mode') or 'step'}": of(a, "step_median_ms")
        / of(b, "step_median_ms")
        for a, b in found
    }
    wins = {name: ratio for name, ratio in ratios.items() if ratio > 1}
    best, worst = (pick(ratios, key=lambda name: ratios[name]) for pick in (max, min))
    return (
        f"Of {len(ratios)} compared, {named} is faster than {beside} in {len(wins)}: "
        f"most, {format_number(ratios[best])} times as fast, with {best}; "
        f"least, {format_number(ratios[worst])} times, with {worst}."
    )


def not_products(rows: Rows) -> str:
    """The share of the time of kernels that is not matrix products."""
    found = fine(rows, "share_matrix_products", "mode")
    shares = {
        group[0]["mode"]: [100 * (1 - of(row, "share_matrix_products")) for row in group]
        for group in grouped(found, ["mode"])
    }
    return "Not matrix products: " + "; ".join(f"{spread(some)} % of {mode}" for mode, some in shares.items()) + "."


def softmax_beside_products(rows: Rows) -> str:
    """What softmax costs inside attention, beside the operations that it has."""
    found = fine(rows, "softmax_over_products_time", "softmax_over_products_flops")
    times, flops = ([of(row, f"softmax_over_products_{what}") for row in found] for what in ("time", "flops"))
    return (
        f"Inside attention softmax takes {spread(times)} times as long as the two products, "
        f"with {spread(flops)} times their operations."
    )


_MEMORY_SERIES = ("preset", "model", "batch", "context", "mode", "dtype", "every")


def peak_growth(rows: Rows) -> str:
    """How peak memory grows with the context."""
    peak = column_of(rows, "peak_bytes", "recorded_peak_bytes")
    series = grouped(fine(rows, peak, "context"), [name for name in _MEMORY_SERIES if name != "context"])
    said = [power for _, power in powers_of(series, "context", peak)]
    return f"Peak memory grows with the context to the power of {spread(said, 2)}, from the longest two."


def quadratic_share(rows: Rows) -> str:
    """What share of the memory held for the backward is tensors of all pairs of tokens."""
    found = fine(rows, "quadratic_kept_bytes", "held_bytes", "context")
    shares = {
        group[0]["context"]: [100 * of(row, "quadratic_kept_bytes") / of(row, "held_bytes") for row in group]
        for group in grouped(found, ["context"])
    }
    said = "; ".join(f"{spread(some)} % at {context}" for context, some in shares.items())
    return f"Of what is held for the backward, tensors of all pairs of tokens are, by context: {said}."


def mixed_memory(rows: Rows) -> str:
    """Peak memory in mixed precision, beside that in float32."""
    peak = column_of(rows, "peak_bytes", "recorded_peak_bytes")
    but = [name for name in _MEMORY_SERIES if name != "dtype"]
    found = pairs(fine(rows, peak, "dtype", "mode"), "dtype", "float32", "mixed", but)
    ratios: dict[str, list[float]] = {}
    for single, mixed in found:
        ratios.setdefault(single["mode"], []).append(of(mixed, peak) / of(single, peak))
    said = "; ".join(f"{spread(some)} in {mode}" for mode, some in ratios.items())
    return f"The peak in mixed precision is so many times that in float32: {said}."


def sums(rows: Rows) -> str:
    """What the sum of 1000 times 0.01 comes to."""
    found = [row for row in fine(rows, "kind", "name") if row["kind"] == "accumulation"]
    totals = [f"{row['name']} {float(row['total']):.4f}" for row in fine(found, "total")]
    return f"1000 × 0.01 is 10 and comes to: {'; '.join(totals)}."


def within_budget(rows: Rows) -> str:
    """Whether errors are within the budget, and how large they are."""
    found = [row for row in fine(rows, "kind", "name") if row["kind"] == "attention"]
    judged = fine(found, "within_budget", "out_relative", "dtype")
    wrong = [row for row in judged if row["within_budget"] != "True"]
    beyond = [f"{row['name']}, {row['dtype']}, length {row['length']}" for row in wrong]
    by_dtype = [
        f"{group[0]['dtype']} {_exponents(errors)}"
        for group in grouped(judged, ["dtype"])
        for errors in [[of(row, "out_relative") for row in group]]
    ]
    verdict = f"beyond their budget: {'; '.join(beyond)}" if beyond else "all are within their budget"
    return f"Of {len(judged)} calls of attention, {verdict}; errors of the output, relative: {'; '.join(by_dtype)}."


def _exponents(values: Sequence[float]) -> str:
    least, most = f"{min(values):.1e}", f"{max(values):.1e}"
    return least if least == most else f"{least} to {most}"


def training_ratio(rows: Rows) -> str:
    """Whole steps beside those with torch's attention."""
    found = fine(rows, "over_sdpa", "model")
    said = "; ".join(
        f"{group[0]['model']} {spread([of(row, 'over_sdpa') for row in group])}" for group in grouped(found, ["model"])
    )
    return f"A whole step is so many times as fast as with torch's attention: {said}."


def host_limits(rows: Rows) -> str:
    """Which whole steps take as long as the host does."""
    found = fine(rows, "host_ms", "median_ms", "model")
    apart = [row for row in found if row.get("peak_gib")]  # of GPUs: a CPU is its own host
    if not apart:
        raise NotMeasuredError("no row is of a device beside its host")
    waiting = [row for row in apart if of(row, "host_ms") > _NEARLY_ALL * of(row, "median_ms")]
    said = "; ".join(f"{row['preset']}, {row['batch']} × {row['context']}, {row['model']}" for row in waiting) or "none"
    return f"Of {len(apart)} steps the host takes over {100 * _NEARLY_ALL:.0f} % of the time in {len(waiting)}: {said}."


def generation_share(rows: Rows) -> str:
    """How near a step of generation comes to the rate of a copy."""
    found = fine(rows, "of_copy", "contender")
    said = "; ".join(
        f"{group[0]['contender']} {spread([100 * of(row, 'of_copy') for row in group])} %"
        for group in grouped(found, ["contender"])
    )
    return f"Of the rate of a copy in memory: {said}."


ANSWERS: dict[str, dict[str, Answer]] = {
    "transformer": {
        "Backward beside forward": backward_over_forward,
        "What warm-up changes": warm_up,
        "Where bfloat16 pays": half_pays,
        "Where compilation pays": compile_pays,
    },
    "attention": {
        "Who is the fastest": attention_fastest,
        "Backward beside forward": attention_ratio,
        "Where bfloat16 pays": attention_half,
        "What is quadratic": attention_growth,
    },
    "breakdown": {
        "What is not matrix products": not_products,
        "Softmax beside the products": softmax_beside_products,
    },
    "memory": {
        "How memory grows": peak_growth,
        "What is quadratic": quadratic_share,
        "What mixed precision changes": mixed_memory,
    },
    "precision": {"What sums lose": sums, "Errors of attention": within_budget},
    "training_step": {
        "This library's attention in a whole step": training_ratio,
        "Where the device waits for the host": host_limits,
    },
    "generation": {"How near to the memory's rate": generation_share},
}
"""By program, the questions that its rows are asked."""
