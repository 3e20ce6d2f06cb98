"""Comparisons in which a provider fails and the others go on, outcomes of exceptions, and rows kept on disk."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch

from benchmarks.lib import harness
from benchmarks.lib.comparison import Comparison, Context, DeviceLostError, ran_out_of_memory, time_columns
from benchmarks.lib.results import Outcome, RowStore, Status, outcome_of
from cs336_systems.profiling.timing import RoundTimes, TimingMethod

from .test_harness import CASES, PROGRAM, Square, options, rows_in

METHOD = TimingMethod(rounds=2, warmup_ms=0, repetitions_ms=0, pause_ms=0)


def fail(what: str) -> Callable[[], float]:
    def act() -> float:
        if what == "crash":
            os._exit(7)
        if what == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory")
        if what == "lost":
            raise DeviceLostError("the device does not respond")
        return {"naive": 4.0, "fast": 2.0}[what]

    return act


def compare(case: Square, context: Context) -> list[harness.Row]:
    comparison, names = Comparison(context), ("naive", "fast", "oom", "crash", "lost")
    for name in names:
        comparison.attempt(name, "first call", fail(name))
    comparison.interleave({name: fail(name) for name in names}, METHOD)
    return [
        {"provider": name, **comparison.columns(name), **comparison.speedup_columns("speedup", name, "naive")}
        for name in names
    ]


def test_a_provider_that_ends_the_process_is_excluded_and_the_others_are_measured(tmp_path):
    program = dataclasses.replace(PROGRAM, measure=compare)
    assert harness.run(program, options("--out", tmp_path), CASES[:1]) == 0
    rows = {row["provider"]: row for row in rows_in(tmp_path)}
    statuses = {"naive": "ok", "fast": "ok", "oom": "oom", "crash": "error", "lost": "error"}
    assert {name: row["status"] for name, row in rows.items()} == statuses
    assert rows["crash"]["reason"] == "the process ended with status 7, at: crash first call"
    assert "the device does not respond" in rows["lost"]["reason"]
    assert [rows["fast"][f"speedup{end}"] for end in ("", "_low", "_high")] == [2.0] * 3
    assert rows["fast"]["round_ms"] == [2.0, 2.0]
    assert rows["oom"]["speedup"] is None


def test_a_failure_in_the_rounds_is_that_providers_alone():
    comparison = Comparison(Context(options()))
    left = [1.0]
    comparison.attempt("tired", "first call", lambda: 1)
    comparison.attempt("good", "first call", lambda: 1)
    comparison.interleave({"tired": lambda: left.pop(), "good": lambda: 1.0}, METHOD)
    assert comparison.columns("tired")["status"] == "error"
    assert comparison.columns("tired")["median_ms"] is None
    assert comparison.columns("good")["median_ms"] == 1.0


def test_a_device_that_does_not_respond_is_lost(monkeypatch):
    def synchronize(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("benchmarks.lib.comparison.synchronize", synchronize)
    with pytest.raises(DeviceLostError, match="does not respond after wild failed: ZeroDivisionError"):
        Comparison(Context(options())).attempt("wild", "first call", lambda: 1 / 0)


def test_time_columns():
    columns = time_columns(RoundTimes((1.0, 3.0, 2.0)))
    values = {
        "rounds": 3,
        "median_ms": 2.0,
        "low_ms": 1.0,
        "high_ms": 3.0,
        "precise": False,
        "min_ms": 1.0,
        "max_ms": 3.0,
        "mean_ms": 2.0,
        "std_ms": 1.0,
    }
    assert columns == values | {"round_ms": [1.0, 3.0, 2.0]}
    assert time_columns(None) == dict.fromkeys(columns)


def test_a_series_that_ran_out_of_memory():
    rows = [{"model": "small", "length": 512, "batch": 4, "status": "oom"}]
    larger = {"model": "small", "length": 1024, "batch": 4}
    outcome = ran_out_of_memory(larger, rows, "length", "batch")
    assert outcome == Outcome(Status.SKIPPED, "memory ran out at length 512, batch 4 of the same series")
    for other in ({"model": "large"}, {"batch": 2}, {"length": 256}):
        assert ran_out_of_memory(larger | other, rows, "length", "batch") is None
    assert ran_out_of_memory(larger, [rows[0] | {"status": "ok"}], "length", "batch") is None


def test_exceptions_become_outcomes():
    full = outcome_of(torch.OutOfMemoryError("CUDA out of memory.\nTried"))
    assert full.columns == {"status": "oom", "reason": "CUDA out of memory. Tried"}
    assert outcome_of(ValueError("no"), refusals=(ValueError,)) == Outcome(Status.UNSUPPORTED, "no")
    with pytest.raises(ValueError, match="complex") as raised:
        int("complex")
    line = raised.traceback[-1].lineno + 1
    assert outcome_of(raised.value).reason.endswith(f"'complex' (test_comparison.py:{line})")
    assert len(outcome_of(RuntimeError("word " * 1000)).reason) < 330
    assert outcome_of(RuntimeError()).reason == "RuntimeError: no message"


def test_the_store_keeps_rows_over_crashes(tmp_path):
    store = RowStore(tmp_path, {"seed": 0, "gone": 1}, resume=False)
    rows = [{"ms": 1.5, "each": [1, 2], "count": None}, {"ms": None, "text": "x,y", "count": 3}]
    store.append("a", rows)
    store.append("b", [])
    assert (tmp_path / "results.csv").read_text().splitlines() == ["ms,each,count,text", "1.5,1;2,,", ',,3,"x,y"']
    with pytest.raises(ValueError, match="got 'a' again"):
        store.append("a", [])
    with pytest.raises(ValueError, match="JSON compliant"):
        store.append("c", [{"ms": float("nan")}])
    with pytest.raises(ValueError, match="gone was 1 and is now 'nothing'; new was 'nothing' and is now 2"):
        RowStore(tmp_path, {"seed": 0, "new": 2}, resume=True)
    journal = tmp_path / "journal.jsonl"
    journal.write_text(journal.read_text()[:-3])  # a crash cut off the last line
    again = RowStore(tmp_path, {"seed": 0, "gone": 1}, resume=True)
    assert ("a" in again, "b" in again) == (True, False)
    assert again["a"] == again.rows == rows
    again.append("b", [{"ms": 2.0}])
    assert RowStore(tmp_path, {"seed": 0, "gone": 1}, resume=True)["b"] == [{"ms": 2.0}]
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"no settings\.json"):
        RowStore(tmp_path, {}, resume=True)
    journal.unlink()
    with pytest.raises(ValueError, match=r"no journal\.jsonl"):
        RowStore(tmp_path, {}, resume=True)
