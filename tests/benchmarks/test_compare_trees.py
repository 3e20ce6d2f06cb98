"""Checkouts side by side: each computes with its own library, is checked, and is timed in turns."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from benchmarks import compare_trees
from benchmarks.compare_trees import Cell, TreeError, cells_of, parse, rows_of, tree_of
from cs336_systems.profiling.timing import RoundTimes

ROOT = Path(__file__).resolve().parents[2]
CELL = Cell("backward", "causal", (2, 4, 64, 16))
SETTINGS = {"device": "cpu", "dtype": "float32", "impl": "naive", "method": {"rounds": 1, "repetitions_ms": 1.0}}


@pytest.fixture
def changed(tmp_path):
    """A checkout whose naive attention is wrong."""
    tree = tmp_path / "changed"
    shutil.copytree(ROOT / "cs336_systems", tree / "cs336_systems", ignore=shutil.ignore_patterns("__pycache__"))
    path = tree / "cs336_systems" / "attention" / "run.py"
    path.write_text(path.read_text() + "\nfor _name in [*RUN]:\n    RUN[_name] = lambda *a, _run=RUN[_name]: 1 / 0\n")
    return tree


def test_cells():
    sizes = ["--dims", "16", "32", "--lengths", "64", "--masks", "full"]
    options = parse([str(ROOT), "--passes", "forward", "--device", "cpu", *sizes])
    assert cells_of(options) == [Cell("forward", "full", (4, 4, 64, 16)), Cell("forward", "full", (4, 2, 64, 32))]
    assert CELL.flops == 2.5 * 2 * 2 * 4 * 64 * 64 * (16 + 16) / 2
    assert str(CELL) == "backward, d 16, causal, 64"


def test_rows():
    times = {"before": RoundTimes((4.0, 6.0, 5.0)), "after": RoundTimes((2.0, 3.0, 2.0))}
    before, after = rows_of(CELL, times)
    assert (before["over_first"], after["over_first"]) == (1.0, 2.0)
    assert after["tflops"] == pytest.approx(CELL.flops / 2e-3 / 1e12)
    assert compare_trees.line_of(CELL, [before, after])[2].endswith("(2.000)")


def test_decoding_has_one_query_a_head():
    options = parse([str(ROOT), "--passes", "decode", "--dims", "16", "--lengths", "64", "--groups", "2"])
    (cell,) = cells_of(options)
    assert cell == Cell("decode", "causal", (4, 2, 64, 16), groups=2)
    assert cell.flops == 2 * 4 * 4 * 1 * 64 * (16 + 16)
    assert str(cell) == "decode, d 16, 4 × 64, 2 heads a group"


def test_two_checkouts(tmp_path, capsys):
    calls = ["--lengths", "64", "--dims", "16", "--groups", "2", "--passes", "forward", "both", "decode"]
    how = ["--impl", "naive", "--rounds", "2", "--output", str(tmp_path / "rows.csv")]
    assert compare_trees.main([str(ROOT), f"{ROOT}:{tmp_path}", *calls, *how]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("| TFLOP/s")
    assert shown[2].startswith("| forward, d 16, causal, 64")
    with (tmp_path / "rows.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["pass"] for row in rows] == ["forward", "forward", "both", "both", "decode", "decode"]
    assert all(float(row["median_ms"]) > 0 for row in rows)


def test_each_computes_with_its_own_library(changed):
    with tree_of(str(ROOT), SETTINGS) as whole, tree_of(str(changed), SETTINGS) as other:
        for what in ("check", "prepare"):
            whole.ask(what, CELL)
            whole.answer(CELL)
        assert whole.time(CELL) > 0
        other.ask("check", CELL)
        with pytest.raises(TreeError, match="changed: backward, d 16, causal, 64: ZeroDivisionError"):
            other.answer(CELL)


def test_a_checkout_that_fails_ends_the_comparison(changed, capsys):
    assert compare_trees.main([str(ROOT), str(changed), "--lengths", "64", "--dims", "16", "--impl", "naive"]) == 1
    assert f"compare_trees.py: error: {changed}: forward" in capsys.readouterr().err


def test_packages_go_before_the_installed_ones(tmp_path):
    (tmp_path / "einops.py").write_text("raise SystemExit(7)")
    with tree_of(f"{ROOT}:{tmp_path}", SETTINGS) as tree:
        tree.ask("prepare", CELL)
        with pytest.raises(TreeError, match="its process ended with 7"):
            tree.answer(CELL)


@pytest.mark.parametrize(
    ("trees", "said"),
    [
        (["/nowhere"], "TREE must be a checkout"),
        ([f"{ROOT}:/nowhere"], "PACKAGES must be a folder"),
        ([str(ROOT)] * 2, "named once"),
    ],
)
def test_trees_that_cannot_be_compared(trees, said, capsys):
    with pytest.raises(SystemExit):
        parse(trees)
    assert said in capsys.readouterr().err
