"""The precision benchmark: its cells, its rows, and its tables."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch

from benchmarks import precision, precision_cells, suite
from benchmarks.precision import cells_of, parse
from benchmarks.precision_cells import ACCUMULATION, AUTOCAST, Cell, Conditions, columns_of_findings, measure_cell
from benchmarks.precision_report import COLUMNS, report
from cs336_systems.attention import attention
from cs336_systems.profiling.environment import collect_environment
from cs336_systems.testing import Finding

SHORT = ("--length", "16", "--dim", "8", "--dtype", "fp32", "--device", "cpu")
CONDITIONS = Conditions(torch.device("cpu"), ("tiled", "sdpa", "flash"), batch=1, heads=2, seed=0, tf32=False)
PROBLEM = Cell("attention", "float32", "causal", 16, 8)


def run_here(monkeypatch, folder, *arguments):
    """The program, with cells measured in this process."""
    monkeypatch.setattr(suite, "measured_alone", lambda measure, job, limit: measure(job))
    return precision.main([*SHORT, "--commit", "abc", "--output", str(folder), *arguments])


def rows_in(folder):
    with (folder / "results.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def test_cells_are_the_sums_two_dtypes_of_autocast_and_every_problem():
    cells = cells_of(parse([*SHORT, "--mask", "causal", "full"]))
    assert [cell.key for cell in cells] == [
        "accumulation",
        "autocast float16",
        "autocast bfloat16",
        "attention float32 causal d 8 length 16",
        "attention float32 full d 8 length 16",
    ]
    assert cells_of(parse(["--what", "accumulation"])) == [Cell(ACCUMULATION)]


def test_every_row_has_its_figures(tmp_path, monkeypatch):
    assert run_here(monkeypatch, tmp_path, "--impl", "tiled", "sdpa", "flash") == 0
    rows = rows_in(tmp_path)
    sums = {row["name"]: float(row["total"]) for row in rows if row["kind"] == ACCUMULATION}
    assert sums["float16"] == 9.953125
    assert len(sums) == 6
    layer_norm = [row for row in rows if (row["kind"], row["what"], row["name"]) == (AUTOCAST, "output", "ln")]
    assert [(row["dtype"], row["found"]) for row in layer_norm] == [(name, name) for name in ("float16", "bfloat16")]
    tiled, torchs = (next(row for row in rows if row["name"] == name) for name in ("tiled", "sdpa"))
    assert tiled["within_budget"] == torchs["within_budget"] == "True"
    assert 0 < float(tiled["dq_largest"]) <= float(tiled["dq_largest_budget"])
    assert 0 < float(tiled["of_budget"]) <= 1
    assert tiled["lse_norm"]
    assert not torchs["lse_norm"]
    assert {row["commit"] for row in rows} == {"abc"}
    assert [*rows[0]] == [*COLUMNS]


def test_what_cannot_compute_it_says_so_and_the_others_go_on(monkeypatch):
    def attend(*tensors, impl, **settings):
        if impl == "flash":
            raise ValueError("not on this device")
        return attention(*tensors, impl=impl, **settings)

    monkeypatch.setattr(precision_cells, "attention", attend)
    rows: Any = measure_cell((PROBLEM, CONDITIONS))
    assert [(row["name"], row["status"]) for row in rows] == [
        ("tiled", "ok"),
        ("sdpa", "ok"),
        ("flash", "unsupported"),
    ]
    assert rows[2]["reason"] == "not on this device"


def test_memory_that_ran_out_is_the_status_of_the_cell(monkeypatch):
    def fails(*arguments, **settings):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(precision_cells, "make_inputs", fails)
    assert measure_cell((PROBLEM, CONDITIONS)) == {"status": "oom", "reason": "no room"}


def test_what_is_not_finite_is_within_no_budget_and_can_be_stored():
    nan = float("nan")
    columns = columns_of_findings([Finding("out", "norm", nan, 0.1, 1.0, 0.2), Finding("out", "largest", 0, 0, 1, 1)])
    assert columns["out_norm"] is None
    assert columns["of_budget"] is None
    assert columns["within_budget"] is False


def test_the_page_says_who_is_beyond_the_budget_and_what_has_no_figure():
    finding = Finding("out", "norm", 0.5, 0.1, 1.0, 0.2), Finding("out", "largest", 0.1, 0.1, 1.0, 0.2)
    problem = {"kind": "attention", "dtype": "float32", "mask": "causal", "length": 16, "head_dim": 8, "reason": ""}
    rows = [
        problem | {"name": "wrong", "status": "ok"} | columns_of_findings([*finding]),
        problem | {"name": "absent", "status": "unsupported", "reason": "not here"},
    ]
    page = report(rows, collect_environment("cpu", commit="abc"), ["by hand"])
    assert "250 %" in page
    assert "NO |" in page
    assert "1.0e-01 / 2.0e-01" in page
    assert "- attention float32 absent: unsupported: not here" in page
    assert "added up" not in page


def test_a_dry_run_lists_the_cells(tmp_path, capsys):
    assert precision.main([*SHORT, "--dry-run", "--output", str(tmp_path / "none")]) == 0
    assert "attention float32 causal d 8 length 16: 8 s" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


def test_heads_that_cannot_be_end_the_program(capsys):
    with pytest.raises(SystemExit):
        parse(["--heads", "-1"])
    assert "--heads must be at least 0; got -1" in capsys.readouterr().err
