"""The pages of the course's questions: which rows they take, and their cells."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.questions import QUESTIONS, lines
from benchmarks.report_presets import PRESETS, parts_of

from .small_models import changed

BY_NAME = {question.name: question for question in QUESTIONS}


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "--" not in line]


def timed(prefix, median, spread=0.0):
    ends = {"median": median, "low": median - spread, "high": median + spread}
    return {f"{prefix}{name}_ms": value for name, value in ends.items()} | {"status": "ok"}


def step(spread=0.0, **changes):
    case = changed(mode="step", **changes)
    row = timed("", 12.0, spread) | timed("forward_", 2.0) | timed("both_", 8.0, spread) | {"peak_mib": 50.0}
    return {**case.columns, **row, "mean_ms": 13.0, "std_ms": 1.0, "first_step_ms": 99.0}


@pytest.mark.parametrize("year", ["2025", "2026"])
def test_every_question_is_asked_of_a_part_of_every_year(year):
    names = {part.name for part in parts_of(year, gpu=True)}
    assert all(any(question.asks_for(name) for name in names) for question in QUESTIONS)
    assert "transformer-warmup" not in {name for name in names if BY_NAME["timing"].asks_for(name)}
    assert all(
        part.name != "attention-causal" or not BY_NAME["attention"].asks_for(part.name)
        for name in PRESETS
        for part in parts_of(name, gpu=True)
    )


def test_a_table_has_a_line_for_each_index_and_leaves_empty_columns_out():
    frame = pd.DataFrame(
        {"a": [1, 2, 1], "kind": ["x", "x", "y"], "ms": [1.0, 2.0, None], "status": ["ok", "ok", "oom"]}
    )
    columns = {
        "of x": ("kind == 'x'", "ms"),
        "of y": ("kind == 'y'", "ms"),
        "none": ("kind == 'z'", "ms"),
        "no": ("kind == 'x'", "no"),
    }
    assert cells(lines(frame, ["a"], columns)) == [["a", "of x", "of y"], ["1", "1.00", "oom"], ["2", "2.00", "–"]]
    assert lines(frame, ["a"], {"none": ("kind == 'z'", "ms")}) == ""


def test_timing_has_rivals_in_neighbouring_lines():
    rows = [
        {**changed(mode="forward", provider=provider, context_length=length).columns, **timed("", 1.0)}
        for provider in ("naive", "flash")
        for length in (32, 16)
    ]
    rows += [step(spread=1.0, provider=provider, context_length=16) for provider in ("naive", "flash")]
    rows.append({**changed(mode="step", provider="naive", context_length=32).columns, "status": "oom"})
    rows.append(step(provider="naive", compile="whole"))
    (table,) = BY_NAME["timing"].tables(pd.DataFrame(rows)).values()
    title, *found = cells(table)
    assert [line[2:4] for line in found] == [["16", "flash"], ["16", "naive"], ["32", "flash"], ["32", "naive"]]
    line = dict(zip(title, found[1], strict=True))
    assert line["float32: forward, ms"] == "1.00"
    assert (line["float32: both, ms"], line["float32: step, ms"]) == ("8.00", "12.0")
    assert line["float32: both / forward"] == "4.00 (3.50 to 4.50)"
    assert dict(zip(title, found[3], strict=True))["float32: step, ms"] == "oom"
    assert not any("bfloat16" in name for name in title)


def test_warm_up_has_a_column_for_each_number_of_steps():
    rows = [step(warmup_steps=count) for count in (5, 0)]
    (table,) = BY_NAME["warm-up"].tables(pd.DataFrame(rows)).values()
    title, line = cells(table)
    assert title[3:] == [
        "the first step, ms",
        *(f"after {n}: mean ± std, ms" for n in (0, 5)),
        *(f"after {n}: median" for n in (0, 5)),
    ]
    assert line[3:] == ["99.0", "13.0 ± 1.00", "13.0 ± 1.00", "12.0", "12.0"]


def test_mixed_precision_and_compilation_are_pairs():
    halved = step(dtype="bfloat16") | timed("both_", 4.0) | {"peak_mib": 25.0}
    (table,) = BY_NAME["mixed-precision"].tables(pd.DataFrame([step(), halved])).values()
    assert {"12.0 → 12.0 (1.00×)", "8.00 → 4.00 (2.00×)", "50.0 → 25.0 (2.00×)"} <= {*cells(table)[1]}
    compiled = step(compile="whole") | timed("both_", 2.0)
    alone = {"provider": "compiled", "pass": "forward", "dtype": "float32", "length": 16, "head_dim": 8, "status": "ok"}
    alone |= {"speedup_over_naive": 1.5, "speedup_over_naive_low": 1.4, "speedup_over_naive_high": 1.6}
    models, attention = BY_NAME["compilation"].tables(pd.DataFrame([step(), compiled, alone])).values()
    assert "8.00 → 2.00 (4.00×)" in cells(models)[1]
    assert cells(attention) == [["length", "head_dim", "float32, forward"], ["16", "8", "1.50 (1.40 to 1.60)"]]


def test_kernels_and_memory():
    columns = changed(mode="forward").columns | {"status": "ok"}
    row = columns | {
        "share_matrix_products": 0.75,
        "softmax_over_products_time": 0.5,
        "softmax_over_products_flops": 0.02,
    }
    row |= {"top": "gemm", "top_share": 0.4, "top_no_product": "softmax", "top_no_product_share": 0.25}
    shares, longest = BY_NAME["kernels"].tables(pd.DataFrame([row])).values()
    assert cells(shares)[1][3:] == ["0.750", "0.500", "0.0200"]
    assert cells(longest)[1][3:] == ["`gemm` 40%", "`softmax` 25%"]
    rows = [
        columns | {"recompute_every": every, "residual_mib": 1.0, "peak_mib": peak}
        for every, peak in ((None, 9.0), (2, 5.0))
    ]
    (table,) = BY_NAME["memory"].tables(pd.DataFrame(rows)).values()
    assert cells(table)[1][3:] == ["1.00", "9.00"]


def test_attention_shows_where_memory_ends():
    columns = {"mask": "full", "dtype": "float32", "head_dim": 64, "status": "ok"}
    rows = [
        columns | {"length": 1024, "provider": name, "pass": which, "median_ms": 2.0, "held_mib": 3.0}
        for name in ("naive", "flash")
        for which in ("forward", "backward")
    ]
    rows += [columns | {"length": 65536, "provider": "naive", "pass": "backward", "status": "oom"}]
    rows += [columns | {"length": 64, "provider": "torch-efficient", "pass": "forward", "status": "unsupported"}]
    (table,) = BY_NAME["attention"].tables(pd.DataFrame(rows)).values()
    title, first, last = cells(table)
    assert title[2:] == [
        *(f"{which}, {name}, ms" for which in ("forward", "backward") for name in ("naive", "flash")),
        *("held, naive, MiB", "held, flash, MiB"),
    ]
    assert first == ["1024", "64", "2.00", "2.00", "2.00", "2.00", "3.00", "3.00"]
    assert last == ["65536", "64", "–", "–", "oom", "–", "oom", "–"]
