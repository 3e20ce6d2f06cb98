"""The account of attention's memory in the tables of the course's sweeps."""

from __future__ import annotations

import pytest

from benchmarks.attention_account import account_of
from benchmarks.attention_report import Report
from cs336_systems.profiling.environment import collect_environment

ROW = {
    "preset": "course",
    "implementation": "naive",
    "pass": "backward",
    "dtype": "float32",
    "mask": "full",
    "batch": 8,
    "heads": 0,
    "kv_heads": 0,
    "length": 1024,
    "head_dim": 64,
    "status": "ok",
    "held_mib": 66.0,
}
ROWS = [
    ROW | {"pass": "forward", "held_mib": None},
    ROW,
    ROW | {"implementation": "flash", "held_mib": 2.03125},
    ROW | {"implementation": "flash", "length": 2048, "held_mib": 4.0625},
    ROW | {"length": 2048, "held_mib": None, "status": "oom"},
    ROW | {"implementation": "absent", "held_mib": None, "status": "unsupported"},
]


def lines_of(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_formulas_stand_beside_what_was_measured():
    _, formulas, account, _, measured = account_of(ROWS)
    assert "scores B·H·N²·s" in formulas
    assert "held with 0 B·H·N·d·s + 4·B·H·N" in formulas
    # 8 × 1024 × 64 × 4 bytes are 2 MiB, 8 × 1024² × 4 bytes are 32 MiB, and twice the length is 4 of those.
    assert [lines_of(account)[i] for i in (0, 2, 3)] == [
        ["length", "d", "inputs", "scores", "probabilities", "output", *(f"held with {n}" for n in (3, 2, 1, 0))],
        ["1024", "64", "6.00", "32.0", "32.0", "2.00", "98.0", "66.0", "34.0", "2.03"],
        ["2048", "64", "12.0", "128", "128", "4.00", "388", "260", "132", "4.06"],
    ]
    assert [lines_of(measured)[i] for i in (0, 2, 3)] == [
        ["length", "d", "naive", "flash"],
        ["1024", "64", "66.0 (2.0)", "2.03 (0.0)"],
        ["2048", "64", "oom", "4.06 (0.0)"],
    ]


def test_sixteen_bits_are_half():
    account = account_of([ROW | {"dtype": "bfloat16"}])[2]
    assert lines_of(account)[2][2:6] == ["3.00", "16.0", "16.0", "1.00"]


@pytest.mark.parametrize("changes", [{"preset": "paper"}, {"heads": 8, "kv_heads": 2}])
def test_other_sweeps_have_none(changes):
    assert account_of([ROW | changes]) == []


def test_the_account_is_in_the_report():
    columns = ("reason", "warning", "commit", "median_ms", "tflops", "peak_mib")
    rows = [dict.fromkeys((*columns, "speedup_over_naive", "speedup_over_reference")) | row for row in ROWS]
    page = Report(rows, collect_environment("cpu"), {}, []).tables()
    assert page.count("### Memory account, MiB") == 1
    assert page.index("## float32, full") < page.index("### Memory account, MiB")
