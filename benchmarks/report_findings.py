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
    beside_naive,
    beside_torch,
)
from benchmarks.report_findings_memory import mixed_memory, peak_growth, quadratic_share, recomputing
from benchmarks.report_findings_passes import (
    backward_over_forward,
    compile_pays,
    half_pays,
    length_is_free,
    warm_up,
)
from benchmarks.report_rows import (
    Line,
    NotMeasuredError,
    Rows,
    fine,
    grouped,
    of,
    spread,
    spreads,
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


_NEARLY_ALL = 0.9


def not_products(rows: Rows) -> str:
    """The share of the time of kernels that is not matrix products."""
    found = fine(rows, "share_matrix_products", "mode")
    shares = spreads(found, "mode", lambda row: 100 * (1 - of(row, "share_matrix_products")))
    return "Not matrix products: " + "; ".join(f"{some} % of {mode}" for mode, some in shares) + "."


def softmax_beside_products(rows: Rows) -> str:
    """What softmax costs inside attention, beside the operations that it has."""
    found = fine(rows, "softmax_over_products_time", "softmax_over_products_flops")
    times, flops = ([of(row, f"softmax_over_products_{what}") for row in found] for what in ("time", "flops"))
    return (
        f"Inside attention softmax takes {spread(times)} times as long as the two products, "
        f"with {spread(flops)} times their operations."
    )


def busy(rows: Rows) -> str:
    """How much of the time of a step its kernels take, by context, on a device beside its host."""
    shares = spreads(fine(rows, "busy", "context"), "context", lambda row: 100 * of(row, "busy"))
    said = "; ".join(f"{some} % at {context}" for context, some in shares)
    return f"Kernels take so much of the time of a step, by context: {said}. The rest of it the device waits."


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
    ratios = spreads(fine(rows, "over_sdpa", "model"), "model", lambda row: of(row, "over_sdpa"))
    said = "; ".join(f"{model} {some}" for model, some in ratios)
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
    shares = spreads(fine(rows, "of_copy", "contender"), "contender", lambda row: 100 * of(row, "of_copy"))
    said = "; ".join(f"{contender} {some} %" for contender, some in shares)
    return f"Of the rate of a copy in memory: {said}."


def host_ratio(rows: Rows) -> str:
    """How long eager calls keep the host, beside torch's."""
    found = [row for row in fine(rows, "over_torch", "what", "implementation") if row["implementation"] != "torch"]
    said = [
        f"{group[0]['what']}, " + ", ".join(f"{row['implementation']} {_number(row, 'over_torch')}" for row in group)
        for group in grouped(found, ["what"])
    ]
    return f"A call keeps the host so many times as long as torch's: {'; '.join(said)}."


def leaderboard_rates(rows: Rows) -> str:
    """The rates of the leaderboard's problem."""
    found = fine(rows, "tflops", "mean_ms", "contender")
    said = [f"{row['contender']} {_number(row, 'mean_ms')} ms, {_number(row, 'tflops')} TFLOP/s" for row in found]
    return f"By the mean: {'; '.join(said)}."


def _number(row: Line, column: str) -> str:
    return format_number(of(row, column))


ANSWERS: dict[str, dict[str, Answer]] = {
    "transformer": {
        "Backward beside forward": backward_over_forward,
        "What warm-up changes": warm_up,
        "Where bfloat16 pays": half_pays,
        "Where compilation pays": compile_pays,
        "Where length costs nothing": length_is_free,
    },
    "attention": {
        "Who is the fastest": attention_fastest,
        "These kernels beside torch's": beside_torch,
        "These kernels beside naive": beside_naive,
        "Backward beside forward": attention_ratio,
        "Where bfloat16 pays": attention_half,
        "What is quadratic": attention_growth,
    },
    "breakdown": {
        "What is not matrix products": not_products,
        "Softmax beside the products": softmax_beside_products,
        "How busy the device is": busy,
    },
    "memory": {
        "How memory grows": peak_growth,
        "What is quadratic": quadratic_share,
        "What mixed precision changes": mixed_memory,
        "What recomputing changes": recomputing,
    },
    "precision": {"What sums lose": sums, "Errors of attention": within_budget},
    "training_step": {
        "This library's attention in a whole step": training_ratio,
        "Where the device waits for the host": host_limits,
    },
    "generation": {"How near to the memory's rate": generation_share},
    "host_overhead": {"An eager call beside torch's": host_ratio},
    "leaderboard": {"The rate of the one problem": leaderboard_rates},
}
"""By program, the questions that its rows are asked."""
