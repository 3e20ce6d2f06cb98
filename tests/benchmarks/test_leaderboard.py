"""The course's leaderboard problem."""

from __future__ import annotations

import pytest
import torch

from benchmarks import leaderboard
from benchmarks.leaderboard import Problem, measure
from benchmarks.lib.harness import Context

from .small_models import context, measured, run_here

SMALL = ["--device", "cpu", "--heads", "2", "--lengths", "40", "--head-dims", "16", "--rep", "20", "--commit", "abc"]


def test_both_providers_are_measured(monkeypatch, tmp_path):
    rows = run_here(monkeypatch, leaderboard.main, tmp_path, *SMALL, "--compile", "none")
    assert [(row["provider"], row["status"], row["commit"]) for row in rows] == [
        ("tiled", "ok", "abc"),
        ("torch", "ok", "abc"),
    ]
    for row in rows:
        mean, median, fastest, rate = (float(row[name]) for name in ("mean_ms", "median_ms", "min_ms", "tflops"))
        assert 0 < fastest <= median
        # 7 products of (40, 16) and (16, 40) for 2 heads, half of each.
        assert rate == pytest.approx(7 * 2 * 40**2 * 16 / mean / 1e9)


def test_the_function_is_compiled(monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function: given.append(function) or function)
    row = measured(measure, Problem("torch", "whole", "bfloat16", 2, 40, 16), rep=1.0, warmup=0.0)
    assert row["status"] == "ok", row
    assert len(given) == 1


def test_a_wrong_function_is_not_timed(monkeypatch):
    right = leaderboard.attend_of
    monkeypatch.setattr(leaderboard, "attend_of", lambda name: lambda q, k, v: right(name)(q, k, v) * 1.1)
    row = measured(measure, Problem("tiled", "none", "bfloat16", 2, 40, 16), rep=1.0, warmup=0.0)
    assert row["status"] == "error"
    assert "beyond the budget" in row["reason"]
    assert "median_ms" not in row


def test_with_a_gpu_the_problem_is_the_courses(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert leaderboard.main(["--dry-run"]) == 0
    shape = "compile=whole dtype=bfloat16 heads=16 length=16384 head_dim=64"
    assert capsys.readouterr().out.splitlines()[:2] == [f"provider={name} {shape}" for name in ("flash", "torch")]


@pytest.mark.gpu
def test_on_a_gpu():
    options = context(rep=50.0, warmup=50.0).options
    options.device = torch.device("cuda")
    row = measure(Problem("flash", "whole", "bfloat16", 16, 1024, 64), Context(options))
    assert row["tflops"] > 0
