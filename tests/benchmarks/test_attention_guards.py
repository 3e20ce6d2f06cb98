"""Predictions: what would not fit, and what would take too long."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention_guards
from benchmarks.attention_guards import SeriesHistory, quadratic_bytes, would_not_fit
from benchmarks.attention_presets import Problem
from cs336_systems.profiling.sweep import Status

PROBLEM = Problem("bfloat16", "causal", batch=2, heads=4, kv_heads=4, length=1024, head_dim=64)


def row(length: int, **fields) -> dict[str, object]:
    series = {"implementation": "tiled", "pass": "forward", "dtype": "bfloat16", "mask": "causal", "head_dim": 64}
    shape = {"batch": 2, "heads": 4, "kv_heads": 4, "length": length}
    return {**series, **shape, "status": "ok", "median_ms": None, "probe_ms": None, **fields}


def verdict(rows, problem: Problem = PROBLEM, name: str = "tiled", seconds: float = 1.0):
    return SeriesHistory(rows).verdict(problem, name, "forward", seconds)


def test_score_matrices_are_counted_in_float32_at_least():
    assert quadratic_bytes(PROBLEM, "forward") == 3 * 2 * 4 * 1024**2 * 4
    assert quadratic_bytes(PROBLEM, "backward") == 5 * 2 * 4 * 1024**2 * 4


@pytest.mark.parametrize(
    ("mebibytes", "fits"),
    [(None, True), (10**6, True), (120, True), (119, False), (96, False)],
)
def test_what_would_not_fit_on_a_cpu(monkeypatch, mebibytes, fits):
    monkeypatch.setattr(attention_guards, "available_bytes", lambda device: mebibytes and mebibytes * 2**20)
    outcome = would_not_fit(PROBLEM, "forward", torch.device("cpu"))  # needs 96 MiB, may have four fifths
    assert (outcome is None) == fits
    if outcome is not None:
        assert outcome.status is Status.SKIPPED
        assert "would need 0.1 GiB" in outcome.reason


def test_on_cuda_the_allocator_decides():
    assert would_not_fit(PROBLEM, "both", torch.device("cuda")) is None


def test_nothing_known_nothing_skipped():
    assert verdict([]) is None
    assert verdict([row(512, status="unsupported", reason="")]) is None


def test_memory_that_ran_out_at_a_shorter_length():
    outcome = verdict([row(256, status="oom"), row(512, status="oom")])
    assert outcome is not None
    assert str(outcome) == "skipped: memory ran out at length 256 of the same series"
    assert verdict([row(2048, status="oom")]) is None
    assert verdict([row(256, status="oom", mask="full")]) is None
    assert verdict([row(256, status="oom")], name="naive") is None


def test_time_grows_with_the_operations():
    outcome = verdict([row(256, median_ms=1.0), row(512, median_ms=300.0)])
    assert outcome is not None
    assert "about 1.2 s, judging by length 512: more than the 1 s allowed" in outcome.reason
    assert verdict([row(512, median_ms=300.0)], seconds=1.3) is None


def test_with_a_fixed_number_of_tokens_time_grows_with_the_length_alone():
    assert verdict([row(512, batch=4, median_ms=300.0)]) is None
    assert verdict([row(512, batch=4, median_ms=600.0)]) is not None


def test_a_probe_counts_where_there_were_no_rounds():
    assert verdict([row(512, status="skipped", probe_ms=1500.0)]) is not None


def test_added_rows_count():
    history = SeriesHistory([])
    history.add(row(512, status="oom"))
    assert history.verdict(PROBLEM, "tiled", "forward", 1.0) is not None
