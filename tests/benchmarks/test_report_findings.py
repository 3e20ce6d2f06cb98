"""What the report says of rows: sentences with the right numbers, and why there is none."""

from __future__ import annotations

import pytest

from benchmarks import report_findings as findings
from benchmarks.report_findings import ANSWERS, answered, statements

STEP = {
    "status": "ok",
    "model": "small",
    "batch": "4",
    "context": "256",
    "attn": "auto",
    "arithmetic": "float32",
    "compile": "none",
    "mode": "step",
    "warmup": "5",
    "forward_median_ms": "10",
    "backward_median_ms": "25",
    "step_median_ms": "40",
    "step_mean_ms": "40",
    "step_std_ms": "1",
}
MEMORY = {
    "status": "ok",
    "preset": "small",
    "model": "naive",
    "batch": "4",
    "context": "256",
    "mode": "step",
    "dtype": "float32",
    "every": "",
    "peak_bytes": "400",
    "recorded_peak_bytes": "200",
    "held_bytes": "200",
    "quadratic_kept_bytes": "50",
}
CELL = {
    "status": "ok",
    "implementation": "flash",
    "pass": "forward",
    "dtype": "float32",
    "mask": "full",
    "batch": "8",
    "length": "512",
    "head_dim": "64",
    "median_ms": "4",
    "held_mib": "",
}


def rows_of(base, *changes):
    return [base | change for change in changes]


@pytest.mark.parametrize(
    ("answer", "rows", "expected"),
    [
        (
            findings.backward_over_forward,
            rows_of(STEP, {}, {"forward_median_ms": "5"}, {"model": "large"}, {"warmup": "0", "model": "cold"}),
            "The backward pass takes so many times as long as the forward pass: small 2.50 to 5.00; large 2.50.",
        ),
        (
            findings.warm_up,
            rows_of(STEP, {}, {"warmup": "0", "step_mean_ms": "120", "step_std_ms": "60"}, {"warmup": "1"}),
            "Without warm-up the mean of a step is 3.00 times what it is with 5 before it that are not timed, and the "
            "standard deviation 50 % of the mean in place of 2.5 %.",
        ),
        (
            findings.half_pays,
            rows_of(
                STEP,
                {},
                {"arithmetic": "bfloat16", "step_median_ms": "16"},
                {"context": "128"},
                {"context": "128", "arithmetic": "bfloat16", "step_median_ms": "50"},
                {"context": "64", "arithmetic": "bfloat16"},
                {"warmup": "0", "step_median_ms": "900"},
                {"warmup": "0", "arithmetic": "bfloat16"},
            ),
            "Of 2 compared, bfloat16 autocast is faster than float32 in 1. It is so many times as fast: 0.800 at a "
            "context of 128; 2.50 at a context of 256; most, 2.50, with small, 4 × 256, compile none, step; least, "
            "0.800, with small, 4 × 128, compile none, step.",
        ),
        (
            findings.half_pays,
            rows_of(
                STEP,
                {},
                {"arithmetic": "bfloat16", "step_median_ms": "20"},
                {"compile": "blocks"},
                {"compile": "blocks", "arithmetic": "bfloat16", "step_median_ms": "10"},
            ),
            "Of 2 compared, bfloat16 autocast is faster than float32 in 2. It is so many times as fast: 2.00 to 4.00 "
            "at a context of 256; most, 4.00, with small, 4 × 256, compile blocks, step; least, 2.00, with small, "
            "4 × 256, compile none, step.",
        ),
        (
            findings.compile_pays,
            rows_of(STEP, {}, {"compile": "model", "step_median_ms": "20"}),
            "Of 1 compared, a compiled model is faster than an eager one in 1. It is so many times as fast: 2.00 at a "
            "context of 256; most, 2.00, with small, 4 × 256, float32, step; least, 2.00, with small, 4 × 256, "
            "float32, step.",
        ),
        (
            findings.compile_pays,
            rows_of(
                STEP,
                {},
                {"compile": "blocks", "step_median_ms": "80"},
                {"mode": "forward", "step_median_ms": "10"},
                {"mode": "forward", "step_median_ms": "2", "compile": "model"},
            ),
            "Of 1 compared, a compiled model is faster than an eager one in 1. It is so many times as fast: 5.00 at a "
            "context of 256; most, 5.00, with small, 4 × 256, float32, forward; least, 5.00, with small, 4 × 256, "
            "float32, forward. "
            "Of 1 compared, a model of compiled blocks is faster than an eager one in 0. It is so many times as fast: "
            "0.500 at a context of 256; most, 0.500, with small, 4 × 256, float32, step; least, 0.500, with small, "
            "4 × 256, float32, step.",
        ),
        (
            findings.length_is_free,
            rows_of(
                STEP,
                {},
                {"context": "1024", "step_median_ms": "90"},
                {"context": "512", "step_median_ms": "43"},
                {"context": "320", "step_median_ms": "41", "mode": "forward"},
                {"context": "320", "step_median_ms": "41", "warmup": "0"},
                {"context": "512", "step_median_ms": "10", "arithmetic": "bfloat16"},
                {"context": "1024", "step_median_ms": "10.9", "arithmetic": "bfloat16"},
            ),
            "At twice the length or more a step takes less than 1.1 times as long: 1 of 2 in float32; 1 of 1 in "
            "bfloat16. There the number of operations does not decide the time, and neither the dtype nor the length "
            "shows what it costs.",
        ),
        (
            findings.not_products,
            rows_of(STEP | {"share_matrix_products": "0.75"}, {}, {"share_matrix_products": "0.5", "mode": "forward"}),
            "Not matrix products: 25.0 % of step; 50.0 % of forward.",
        ),
        (
            findings.softmax_beside_products,
            rows_of(STEP | {"softmax_over_products_time": "2", "softmax_over_products_flops": "0.02"}, {}),
            "Inside attention softmax takes 2.00 times as long as the two products, with 0.0200 times their "
            "operations.",
        ),
        (
            findings.busy,
            rows_of(
                STEP | {"busy": "0.25", "measured": "kernels on the device"},
                {},
                {"busy": "0.5"},
                {"context": "512", "busy": "0.9"},
                {"context": "512", "busy": "", "measured": "operators on the host"},
            ),
            "Kernels take so much of the time of a step, by context: 25.0 to 50.0 % at 256; 90.0 % at 512. The rest of "
            "it the device waits.",
        ),
        (
            findings.peak_growth,
            rows_of(
                MEMORY,
                {},
                {"context": "512", "peak_bytes": "1600", "held_bytes": "600"},
                {"mode": "forward", "held_bytes": ""},
                {"mode": "forward", "held_bytes": "", "context": "512"},
            ),
            "From the longest two contexts, peak memory grows to the power of 2.0 in step; 0 in forward; what is "
            "held for the backward, to that of 1.6.",
        ),
        (
            findings.peak_growth,
            rows_of(
                MEMORY | {"peak_bytes": "", "held_bytes": ""}, {}, {"context": "512", "recorded_peak_bytes": "400"}
            ),
            "From the longest two contexts, peak memory grows to the power of 1.0 in step.",
        ),
        (
            findings.quadratic_share,
            rows_of(MEMORY, {}, {"context": "512", "quadratic_kept_bytes": "150"}, {"every": "1", "held_bytes": "10"}),
            "Of what is held for the backward, tensors of all pairs of tokens are, by context: 25.0 % at 256; 75.0 % "
            "at 512.",
        ),
        (
            findings.recomputing,
            rows_of(
                MEMORY | {"median_ms": "10"},
                {},
                {"every": "1", "held_bytes": "20", "peak_bytes": "300", "median_ms": "13"},
                {"every": "2", "held_bytes": "40", "peak_bytes": "320", "median_ms": "12"},
                {"preset": "large", "every": "1"},
            ),
            "With blocks recomputed, however many together, what is held for the backward, the peak, and the time of "
            "a step are so many times what they are without: small 0.100 to 0.200, 0.750 to 0.800 and 1.20 to 1.30.",
        ),
        (
            findings.mixed_memory,
            rows_of(MEMORY, {}, {"dtype": "mixed", "peak_bytes": "300"}),
            "The peak in mixed precision is so many times that in float32: 0.750 in step.",
        ),
        (
            findings.attention_growth,
            rows_of(
                CELL | {"pass": "backward", "held_mib": "8"},
                {},
                {"batch": "4", "length": "1024"},
                {"implementation": "naive"},
                {"implementation": "naive", "length": "1024", "held_mib": "32"},
            ),
            "The memory that a sequence holds for the backward grows with this power of the length, from the longest "
            "two: quadratic: naive (2.0); linear: flash (1.0).",
        ),
        (
            findings.attention_fastest,
            rows_of(CELL, {}, {"implementation": "naive"}, {"implementation": "naive", "length": "1024"}),
            "At length 1024 the fastest, by the sum over head dimensions and masks: forward, float32: naive.",
        ),
        (
            findings.attention_fastest,
            rows_of(CELL, {}, {"head_dim": "128"}, {"implementation": "partial", "median_ms": "1"}),
            "At length 512 the fastest, by the sum over head dimensions and masks: forward, float32: flash.",
        ),
        (
            findings.beside_torch,
            rows_of(
                CELL | {"speedup_over_reference": "2", "reference": "torch-efficient"},
                {},
                {"head_dim": "128", "speedup_over_reference": "4"},
                {"length": "1024", "speedup_over_reference": "8"},
                {"length": "2048", "speedup_over_reference": "6"},
                {"dtype": "bfloat16", "reference": "torch-flash", "pass": "both"},
                {"implementation": "sdpa", "speedup_over_reference": "100"},
            ),
            "flash is so many times as fast as torch's kernel, which is torch-efficient in float32, torch-flash in "
            "bfloat16: float32, forward, 2.00 to 4.00 at 512 and 6.00 at 2048; bfloat16, both, 2.00 at 512.",
        ),
        (
            findings.beside_naive,
            rows_of(CELL | {"speedup_over_naive": "3"}, {}, {"length": "1024", "speedup_over_naive": "5"}),
            "flash is so many times as fast as naive: float32, forward, 3.00 at 512 and 5.00 at 1024.",
        ),
        (
            findings.attention_ratio,
            rows_of(CELL, {}, {"pass": "backward", "median_ms": "10"}),
            "The backward pass takes so many times as long as the forward pass: flash 2.50.",
        ),
        (
            findings.attention_half,
            rows_of(CELL, {}, {"dtype": "bfloat16", "median_ms": "1"}),
            "bfloat16 is so many times as fast as float32: flash 4.00.",
        ),
        (
            findings.sums,
            [{"status": "ok", "kind": "accumulation", "name": "float16", "total": "9.953125"}],
            "1000 × 0.01 is 10 and comes to: float16 9.9531.",
        ),
        (
            findings.training_ratio,
            rows_of({"status": "ok", "model": "flash"}, {"over_sdpa": "1.5"}, {"over_sdpa": "1.25"}),
            "A whole step is so many times as fast as with torch's attention: flash 1.25 to 1.50.",
        ),
        (
            findings.host_limits,
            rows_of(
                {"status": "ok", "preset": "small", "batch": "16", "context": "1024", "peak_gib": "8", "host_ms": "19"},
                {"model": "flash", "median_ms": "20"},
                {"model": "sdpa", "median_ms": "40"},
            ),
            "Of 2 steps the host takes over 90 % of the time in 1: small, 16 × 1024, flash.",
        ),
        (
            findings.generation_share,
            [{"status": "ok", "contender": "graph", "of_copy": "0.8"}],
            "Of the rate of a copy in memory: graph 80.0 %.",
        ),
        (
            findings.host_ratio,
            rows_of(
                {"status": "ok", "what": "forward"},
                {"implementation": "torch", "over_torch": "1"},
                {"implementation": "flash", "over_torch": "1.5"},
                {"implementation": "sdpa", "over_torch": "1.25"},
                {"implementation": "flash", "over_torch": "2", "what": "backward"},
            ),
            "A call keeps the host so many times as long as torch's: forward, flash 1.50, sdpa 1.25; backward, flash "
            "2.00.",
        ),
        (
            findings.leaderboard_rates,
            [{"status": "ok", "contender": "flash", "mean_ms": "3.666", "tflops": "524.4"}],
            "By the mean: flash 3.67 ms, 524 TFLOP/s.",
        ),
    ],
)
def test_sentences_have_the_numbers_of_the_rows(answer, rows, expected):
    assert answer(rows) == expected


def test_errors_beyond_their_budget_are_named():
    row = {"status": "ok", "kind": "attention", "name": "flash", "dtype": "float16", "length": "128"}
    row |= {"within_budget": "True", "out_relative": "2e-4"}
    assert findings.within_budget([row]) == (
        "Of 1 calls of attention, all are within their budget; errors of the output, relative: float16 2.0e-04."
    )
    said = findings.within_budget([row, row | {"within_budget": "False", "name": "wrong"}])
    assert "Of 2 calls of attention, beyond their budget: wrong, float16, length 128;" in said


@pytest.mark.parametrize("program", ANSWERS)
def test_without_rows_or_columns_each_answer_says_so(program):
    assert {said for _, said in statements(ANSWERS[program], [])} == {"not measured: there are no rows"}
    for _, said in statements(ANSWERS[program], [{"status": "ok", "other": "1"}]):
        assert said.startswith("not measured: the rows have no column")


@pytest.mark.parametrize(
    ("answer", "rows", "said"),
    [
        (findings.warm_up, [STEP | {"warmup": "0"}], "no row has warm-up"),
        (findings.warm_up, [STEP], "no two rows differ in warmup alone, 0 and 5"),
        (findings.backward_over_forward, [STEP | {"warmup": "0"}], "every row counts its first step"),
        (findings.compile_pays, [STEP], "no row is of a compiled model"),
        (findings.half_pays, [STEP | {"warmup": "0"}], "every row counts its first step"),
        (findings.half_pays, [STEP], "no two rows differ in arithmetic alone, float32 and bfloat16"),
        (findings.length_is_free, [STEP], "no two rows differ in context alone"),
        (
            findings.busy,
            [STEP | {"busy": "", "measured": "operators on the host"}],
            "no row has a figure for busy, context",
        ),
        (findings.peak_growth, [MEMORY], "no series has two values of context"),
        (findings.quadratic_share, [MEMORY | {"every": "1"}], "every row recomputes blocks"),
        (findings.recomputing, [MEMORY | {"median_ms": "1"}], "no row recomputes blocks"),
        (
            findings.recomputing,
            [MEMORY | {"median_ms": "1", "every": "1"}],
            "no two rows differ in what is recomputed alone",
        ),
        (
            findings.beside_torch,
            [CELL | {"implementation": "sdpa", "speedup_over_reference": "1"}],
            "no row is of flash",
        ),
        (
            findings.peak_growth,
            [MEMORY | {"status": "oom"}],
            "no row has a figure for peak_bytes or recorded_peak_bytes",
        ),
        (
            findings.host_limits,
            [{"status": "ok", "model": "flash", "host_ms": "2", "median_ms": "2", "peak_gib": ""}],
            "no row is of a device beside its host",
        ),
        (findings.mixed_memory, [MEMORY | {"mode": ""}], "no row has a figure for peak_bytes, dtype, mode"),
    ],
)
def test_rows_that_cannot_answer_say_why(answer, rows, said):
    assert answered(answer, rows) == f"not measured: {said}"
