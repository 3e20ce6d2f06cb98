"""The pages of the course's questions: which rows they take, and their cells."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.lib.tables import lines
from benchmarks.parts.questions import QUESTIONS
from benchmarks.parts.report_presets import PRESETS, parts_of

from .small_models import changed

BY_NAME = {question.name: question for question in QUESTIONS}


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "--" not in line]


def timed(prefix, median, spread=0.0):
    ends = {"median": median, "low": median - spread, "high": median + spread}
    return {f"{prefix}{name}_ms": value for name, value in ends.items()} | {"status": "ok"}


def step(spread=0.0, mode="step", **changes):
    case = changed(mode=mode, **changes)
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
    tables = BY_NAME["timing"].tables(pd.DataFrame(rows))
    title, *found = cells(tables["float32: forward, backward, and a step with AdamW"])
    assert [line[2:4] for line in found] == [["16", "flash"], ["16", "naive"], ["32", "flash"], ["32", "naive"]]
    line = dict(zip(title, found[1], strict=True))
    assert (line["forward, ms"], line["both, ms"], line["step, ms"]) == ("1.00", "8.00", "12.0")
    assert line["both / forward"] == "4.00 (3.50 to 4.50)"
    last = dict(zip(title, found[3], strict=True))
    assert (last["step, ms"], last["both, ms"]) == ("oom", "oom")
    assert not any(text for name, text in tables.items() if "bfloat16" in name or "batches" in name)
    # Forward and backward fit where the step does not.
    rows.append(step(mode="forward+backward", provider="naive", context_length=32) | timed("both_", 30.0))
    for each in (rows, rows[::-1]):
        table = BY_NAME["timing"].tables(pd.DataFrame(each))["float32: forward, backward, and a step with AdamW"]
        title, *found = cells(table)
        last = dict(zip(title, found[3], strict=True))
        assert (last["step, ms"], last["both, ms"]) == ("oom", "30.0")


def test_larger_batches_have_their_spread_and_memory():
    row = step(batch=64) | {"min_ms": 11.0, "max_ms": 14.0, "cv": 0.1, "tokens_per_second": 99.0, "reserved_mib": 70.0}
    table = BY_NAME["timing"].tables(pd.DataFrame([row]))["Larger batches: spread of steps, and memory"]
    assert cells(table)[1][5:] == ["11.0", "12.0", "14.0", "0.100", "99.0", "70.0", "50.0"]


def test_warm_up_has_a_column_for_each_number_of_steps():
    rows = [step(warmup_steps=count) for count in (5, 0)]
    tables = BY_NAME["warm-up"].tables(pd.DataFrame(rows))
    title, line = cells(tables["Steps after 0, 1, 2 and more steps of warm-up"])
    assert title[3:] == [
        "the first step, ms",
        *(f"after {n}: mean ± std, ms" for n in (0, 5)),
        *(f"after {n}: median" for n in (0, 5)),
    ]
    assert line[3:] == ["99.0", "13.0 ± 1.00", "13.0 ± 1.00", "12.0", "12.0"]
    both = cells(tables["Forward and backward after 0, 1, 2 and more steps of warm-up"])
    assert both[0][3:] == ["after 0: median", "after 5: median"]
    assert both[1][3:] == ["8.00", "8.00"]


def test_mixed_precision_and_compilation_are_pairs():
    halved = step(dtype="bfloat16") | timed("both_", 4.0) | {"peak_mib": 25.0}
    (table,) = BY_NAME["mixed-precision"].tables(pd.DataFrame([step(), halved])).values()
    assert {"12.0 → 12.0 (1.00×)", "8.00 → 4.00 (2.00×)", "50.0 → 25.0 (2.00×)"} <= {*cells(table)[1]}
    compiled = step(compile="whole") | timed("both_", 2.0)
    alone = {"provider": "compiled", "pass": "forward", "dtype": "float32", "length": 16, "head_dim": 8, "status": "ok"}
    alone |= {"speedup_over_naive": 1.5, "speedup_over_naive_low": 1.4, "speedup_over_naive_high": 1.6}
    models, attention = BY_NAME["compilation"].tables(pd.DataFrame([step(), compiled, alone])).values()
    assert "8.00 → 2.00 (4.00×)" in cells(models)[1]
    assert cells(attention)[:2] == [["length", "head_dim", "float32, forward"], ["16", "8", "1.50 (1.40 to 1.60)"]]
    assert "- float32, forward: geometric mean, × (of how many): compiled 1.50 (1)" in attention
    assert "backward" not in attention


def test_kernels_and_memory():
    columns = changed(mode="forward").columns | {"status": "ok"}
    row = columns | {
        "share_matrix_products": 0.75,
        "softmax_over_products_time": 0.5,
        "softmax_over_products_flops": 0.02,
    }
    row |= {"top": "gemm", "top_share": 0.4, "top_no_product": "softmax", "top_no_product_share": 0.25}
    row |= {"top_instances": 73.0, "median_ms": 2.0, "profiled_ms": 3.0, "busy": 0.5}
    tables = BY_NAME["kernels"].tables(pd.DataFrame([row]))
    shares, softmax, longest, others, cost = (cells(table)[1][3:] for table in tables.values())
    assert (shares, softmax) == (["0.750"], ["0.500", "0.0200"])
    assert (longest, others) == (["`gemm` 40%, 73 ×"], ["`softmax` 25%"])
    assert cost == ["2.00†", "3.00"]  # the GPU waits for the host half of the time
    rows = [
        columns | {"recompute_every": every, "residual_mib": 1.0, "peak_mib": peak}
        for every, peak in ((None, 9.0), (2, 5.0))
    ]
    rows[0]["largest: scores"] = 4.0
    tables = BY_NAME["memory"].tables(pd.DataFrame(rows))
    assert cells(tables["Peak memory"])[1][3:] == ["1.00", "9.00"]
    assert cells(tables["Largest single allocation by category, MiB"])[1][5:] == ["4.00"]
    steps = [{**row, "mode": "step"} for row in rows]
    table = BY_NAME["memory"].tables(pd.DataFrame(steps))["Activation checkpointing"]
    assert [line[3] for line in cells(table)] == ["recompute_every", "none", "2"]


def test_causal_attention_sets_times_side_by_side_and_says_what_flash_gains():
    columns = {"dtype": "bfloat16", "head_dim": 64, "length": 512, "status": "ok"}
    rows = [
        columns | {"provider": name, "pass": which, "median_ms": ms, "speedup_over_naive": 6.0 / ms}
        for which in ("forward", "both")
        for name, ms in (("naive", 6.0), ("flash", 2.0), ("sdpa", 3.0))
    ]
    tables = BY_NAME["attention-causal"].tables(pd.DataFrame(rows))
    times, gains = (
        cells(tables[title])
        for title in ("Causal attention, bfloat16, ms", "flash, bfloat16: how many times as fast as naive")
    )
    assert times[0][2:] == [f"{which}, {name}" for which in ("forward", "both") for name in ("naive", "flash", "sdpa")]
    assert times[1] == ["512", "64", "6.00", "2.00", "3.00", "6.00", "2.00", "3.00"]
    assert gains == [["length", "head_dim", "forward", "both"], ["512", "64", "3.00", "3.00"]]


def test_attention_shows_where_memory_ends():
    columns = {"mask": "full", "dtype": "float32", "head_dim": 64, "status": "ok"}
    rows = [
        columns | {"length": 1024, "provider": name, "pass": which, "median_ms": 2.0, "held_mib": 3.0}
        for name in ("naive", "flash")
        for which in ("forward", "backward")
    ]
    reason = "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 1 GiB."
    rows += [columns | {"length": 65536, "provider": "naive", "pass": "backward", "status": "oom", "reason": reason}]
    rows += [columns | {"length": 64, "provider": "torch-efficient", "pass": "forward", "status": "unsupported"}]
    tables = BY_NAME["attention"].tables(pd.DataFrame(rows))
    title, first, last = cells(tables["Attention alone, float32, without a mask, ms"])
    assert title[2:] == [f"{which}, {name}" for which in ("forward", "backward") for name in ("naive", "flash")]
    assert first == ["1024", "64", "2.00", "2.00", "2.00", "2.00"]
    assert last == ["65536", "64", "–", "–", "oom", "–"]
    assert cells(tables["Memory in float32, MiB"])[1:] == [
        ["1024", "64", "3.00", "3.00", "–"],
        ["65536", "64", "oom", "–", "oom"],
    ]
    assert cells(tables["What has no figure"])[1] == [
        "65536",
        "64",
        "float32",
        "naive",
        "backward",
        "oom",
        "CUDA out of memory. Tried to allocate 2 GiB",
    ]
