"""The course's leaderboard problem."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import leaderboard

SMALL = ["--device", "cpu", "--impl", "tiled", "--heads", "2", "--length", "40", "--dim", "16", "--seconds", "0.02"]


def test_both_contenders_are_measured(capsys, tmp_path):
    assert leaderboard.main([*SMALL, "--eager", "--output", str(tmp_path), "--commit", "abc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "eager: (2, 40, 16), torch.bfloat16, cpu" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[3:5]] == ["tiled", "torch"]
    assert lines[5] == f"wrote {tmp_path / 'tables.md'}"
    page = (tmp_path / "tables.md").read_text()
    assert "- commit: abc" in page
    assert "\n".join(lines[1:5]) in page
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [(row["contender"], row["status"], row["compiled"], row["commit"]) for row in rows] == [
        ("tiled", "ok", "False", "abc"),
        ("torch", "ok", "False", "abc"),
    ]
    for line in lines[3:5]:
        mean, median, fastest, rate = (float(cell) for cell in line.split("|")[2:-1])
        assert 0 < fastest <= median
        # 7 products of (40, 16) and (16, 40) for 2 heads, half of each.
        assert rate == pytest.approx(7 * 2 * 40**2 * 16 / mean / 1e9, rel=0.1)


def test_it_is_compiled(capsys, tmp_path):
    assert leaderboard.main([*SMALL, "--alone", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "under torch.compile" in printed
    assert "| torch " not in printed


def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path):
    wrong = leaderboard.by_function("tiled")
    monkeypatch.setattr(leaderboard, "by_function", lambda name: lambda q, k, v: wrong(q, k, v) * 1.1)
    with pytest.raises(AssertionError, match="beyond the budget"):
        leaderboard.main([*SMALL, "--output", str(tmp_path)])
    assert not [*tmp_path.iterdir()]


def test_with_a_gpu_the_problem_is_the_course_s(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = leaderboard.parse([])
    assert (options.heads, options.length, options.dim, options.dtype) == (16, 16384, 64, torch.bfloat16)
    assert (options.impl, options.device.type, options.warmup, options.seconds) == ("flash", "cuda", 1.0, 10.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu(capsys, tmp_path):
    assert (
        leaderboard.main(["--length", "1024", "--warmup", "0.05", "--seconds", "0.05", "--output", str(tmp_path)]) == 0
    )
    assert "| flash " in capsys.readouterr().out
