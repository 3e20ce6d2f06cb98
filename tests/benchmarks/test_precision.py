"""The precision benchmark: its cases, rows and tables."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks import precision
from benchmarks.lib import harness
from benchmarks.precision import PrecisionCase, error_columns, make_parser, measure, precision_cases, tables
from cs336_systems.attention import attention
from cs336_systems.testing import Finding

from .small_models import context, out_of_memory, run_here

SHORT = ["--device", "cpu", "--lengths", "16", "--head-dims", "8", "--dtypes", "float32", "--commit", "abc"]
PROBLEM = PrecisionCase("attention", "float32", "causal", 1, 2, 8, 16)


def test_cases_are_the_sums_two_dtypes_of_autocast_and_every_problem(capsys):
    assert precision.main([*SHORT, "--masks", "causal", "full", "--dry-run"]) == 0
    problem = "batch=1 heads=2 head_dim=8 length=16: 0.00 GiB"
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "topic=sums",
        "topic=autocast dtype=float16",
        "topic=autocast dtype=bfloat16",
        *(f"topic=attention dtype=float32 mask={mask} {problem}" for mask in ("causal", "full")),
    ]
    parser = make_parser([])
    assert precision_cases(parser.parse_args(["--topics", "sums"])) == [PrecisionCase("sums")]
    with pytest.raises(SystemExit):
        precision.main([*SHORT, "--providers", "magic"])
    assert "--providers must be of flash, sdpa" in capsys.readouterr().err


def test_a_run(monkeypatch, tmp_path):
    rows = run_here(monkeypatch, precision.main, tmp_path, *SHORT, "--providers", "tiled", "sdpa")
    sums = {row["name"]: float(row["total"]) for row in rows if row["topic"] == "sums"}
    assert (sums["float16"], len(sums)) == (9.953125, 6)
    norm = [row for row in rows if (row["topic"], row["role"], row["name"]) == ("autocast", "output", "ln")]
    assert [(row["dtype"], row["tensor_dtype"]) for row in norm] == [(name, name) for name in ("float16", "bfloat16")]
    tiled, torchs = rows[-2:]
    assert (tiled["provider"], tiled["within_budget"], torchs["within_budget"]) == ("tiled", "True", "True")
    assert 0 < float(tiled["dq_largest"]) <= float(tiled["dq_largest_budget"])
    assert 0 < float(tiled["of_budget"]) <= 1
    assert tiled["lse_norm"]
    assert not torchs["lse_norm"]
    text = " ".join((tmp_path / "tables.md").read_text().split())
    assert "| mixed float16, cast | float32 | float16 | True | 10.00213623046875 |" in text
    assert "| gradient of output | ln | LayerNorm | float16 | bfloat16 |" in text
    assert (tmp_path / "error-causal.png").exists()


def test_a_provider_that_refuses_leaves_the_others(monkeypatch):
    def attend(*tensors, impl, **settings):
        if impl == "flash":
            raise ValueError("not on this device")
        return attention(*tensors, impl=impl, **settings)

    monkeypatch.setattr(precision, "attention", attend)
    found = measure(PROBLEM, context(providers=["tiled", "flash", "naive"]))
    assert [(row["provider"], row["status"], row["reason"]) for row in found] == [
        ("tiled", "ok", ""),
        ("flash", "unsupported", "not on this device"),
        ("naive", "ok", ""),
    ]
    half = measure(PrecisionCase("attention", "bfloat16", "full", 1, 0, 8, 16), context(providers=["naive"]))
    assert "lse_norm" not in half[0]


def test_memory_that_runs_out_is_the_status_of_the_case(monkeypatch):
    monkeypatch.setattr(precision, "make_inputs", out_of_memory)
    (row,) = harness.measure_here(measure, PROBLEM, context(providers=["tiled"]))
    assert row["status"] == "oom"


def test_tf32_has_its_own_budget():
    budgets = [
        measure(PROBLEM, context(providers=["tiled"], tf32=tf32))[0]["out_norm_budget"] for tf32 in (False, True)
    ]
    assert budgets[0] < budgets[1]
    assert torch.get_float32_matmul_precision() == "highest"


def test_errors_beyond_the_budget_are_warnings():
    nan = error_columns([Finding("out", "norm", float("nan"), 0.1, 1.0, 0.2), Finding("out", "largest", 0, 0, 1, 1)])
    assert (nan["out_norm"], nan["of_budget"], nan["within_budget"]) == (None, None, False)
    wrong = error_columns([Finding("out", "norm", 0.5, 0.1, 1.0, 0.2), Finding("out", "largest", 0.1, 0.1, 1.0, 0.2)])
    assert (wrong["of_budget"], wrong["warning"]) == (2.5, "an error exceeds its budget")
    text = tables(pd.DataFrame([{**PROBLEM.columns, "provider": "wrong", "status": "ok", **wrong}]))
    assert "5.0e-01" in text
    assert "1.0e-01 / 2.0e-01" in text
    assert "0.01 added" not in text
