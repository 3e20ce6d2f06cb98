"""Marks of cells, ratios with their intervals, and the rows of several visits."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.lib.intervals import HOST_BOUND, IMPRECISE, marks, pooled, quotient, with_interval
from benchmarks.lib.tables import matrix, page
from cs336_systems.profiling.environment import collect_environment


def row(median, low, high, **others):
    return {"median_ms": median, "low_ms": low, "high_ms": high, "status": "ok", "reason": "", **others}


def test_a_figure_with_its_interval():
    assert with_interval(1.234, 1.2, 1.27) == "1.23 (1.20 to 1.27)"
    assert (with_interval(1.5, None, None), with_interval(1.5, 1.5, 1.5)) == ("1.50", "1.50")
    assert with_interval(None, 1.0, 2.0) == with_interval(float("nan"), None, None) == "–"


def test_a_ratio_is_as_wide_as_both_medians_allow():
    slow, fast = row(8.0, 6.0, 9.0, peak_mib=40.0), row(4.0, 3.0, 5.0, peak_mib=10.0)
    assert quotient(slow, fast, "median_ms") == (2.0, 1.2, 3.0)
    assert quotient(slow, fast, "peak_mib") == (4.0, 4.0, 4.0)
    assert quotient(
        {"forward_median_ms": 6.0, "forward_low_ms": 6.0, "forward_high_ms": 9.0},
        fast | {"forward_median_ms": 3.0, "forward_low_ms": 2.0, "forward_high_ms": 3.0},
        "forward_median_ms",
    ) == (2.0, 2.0, 4.5)
    assert quotient(slow, row(None, None, None), "median_ms") is None
    assert quotient(slow, fast | {"peak_mib": 0.0}, "peak_mib") is None


def test_cells_are_marked_and_the_page_says_what_the_marks_mean():
    frame = pd.DataFrame(
        [
            row(1.0, 1.0, 1.0, case="a", precise=True, host_bound=False, length=1, provider="p", mib=5.0),
            row(2.0, 1.0, 3.0, case="b", precise=False, host_bound=True, length=2, provider="p", mib=6.0),
            row(None, None, None, case="c", precise=None, host_bound=None, length=3, provider="p", mib=7.0)
            | {"status": "oom"},
        ]
    )
    assert [*marks(frame)] == ["", HOST_BOUND + IMPRECISE, ""]
    assert [*marks(frame[["case"]])] == [""] * 3
    (line,) = matrix(frame, ["provider"], "length", "median_ms").splitlines()[2:]
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["p", "1.00", f"2.00{HOST_BOUND}{IMPRECISE}", "oom"]
    text = page("Title", collect_environment("cpu"), [], line, frame)
    assert f"- {HOST_BOUND} the device waits for the host" in text
    assert f"- {IMPRECISE} the 95 % confidence interval of the median goes beyond ±2% of it" in text
    memory = matrix(frame, ["provider"], "length", "mib")
    assert HOST_BOUND not in memory  # a size is no time
    assert "waits for the host" not in page("Title", collect_environment("cpu"), [], memory, frame)
    ratios = frame.assign(speedup=[2.0, 3.0, None], speedup_low=[1.5, 2.0, None], speedup_high=[2.5, 4.0, None])
    assert f"3.00 (2.00 to 4.00){HOST_BOUND}{IMPRECISE}" in matrix(ratios, ["provider"], "length", "speedup")


def test_visits_are_taken_together():
    """The middle of the medians, in the widest interval; a failure in any of them is no figure."""

    def visit(number, median, **others):
        return row(median, median - 0.1, median + 0.1, visit=number, provider="x", precise=True, rounds=3, **others)

    first = {"case": "a", "round_ms": [1.0], "host_bound": False, "min_ms": 0.5, "max_ms": 2.0, "speedup_low": 1.0}
    rows = [
        visit(1, 10.0, **first, speedup=2.0),
        visit(1, 4.0, case="b"),
        visit(2, 10.2, **first | {"round_ms": [2.0], "host_bound": True, "min_ms": 0.4, "max_ms": 3.0}, speedup=4.0),
        visit(2, 4.0, case="b") | {"status": "oom", "reason": "full", "median_ms": None},
        visit(3, 11.0, **first, speedup=3.0),
        visit(3, 4.0, case="b"),
    ]
    one, other = pooled(pd.DataFrame(rows)).to_dict("records")
    expected = {"median_ms": 10.2, "low_ms": 9.9, "high_ms": 11.1, "precise": False, "rounds": 3, "speedup": 3.0}
    assert {name: one[name] for name in expected} == pytest.approx(expected)
    assert (one["host_bound"], one["min_ms"], one["max_ms"], one["round_ms"]) == (True, 0.4, 3.0, [1.0, 2.0, 1.0])
    assert (other["case"], other["status"], other["reason"]) == ("b", "oom", "full")
    assert pd.isna(other["median_ms"])
    single = pd.DataFrame(rows[:2])
    assert pooled(single) is single
