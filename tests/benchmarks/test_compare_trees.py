"""Checkouts compared: each computes with its own library, is checked, and is timed in turns."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import compare_trees
from benchmarks.compare_trees import Tree, TreeCase, TreeError, cases_of, parse, tables

ROOT = Path(__file__).resolve().parents[2]
CASE = TreeCase("naive", "backward", "float32", "causal", batch=2, heads=4, kv_heads=4, head_dim=16, length=64)
SMALL = ["--device", "cpu", "--lengths", "64", "--head-dims", "16", "--providers", "naive", "--rounds", "2"]


@pytest.fixture
def wrong(tmp_path):
    """A checkout whose tiled attention is wrong."""
    tree = tmp_path / "wrong"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cs336_systems", tree / "cs336_systems", ignore=ignored)
    path = tree / "cs336_systems" / "attention" / "__init__.py"
    lines = ["_right = attention", "def attention(*tensors, impl, **options):"]
    lines += ["    return _right(*tensors, impl=impl, **options) * (1.5 if impl == 'tiled' else 1)"]
    path.write_text("\n".join([path.read_text(), *lines, ""]))
    return tree


def test_cases():
    sizes = ["--head-dims", "16", "32", "--lengths", "64", "--masks", "full", "--groups", "2"]
    options = parse([str(ROOT), "--passes", "forward", "--device", "cpu", *sizes])
    first = TreeCase("tiled", "forward", "float32", "full", batch=4, heads=4, kv_heads=2, head_dim=16, length=64)
    second = TreeCase("tiled", "forward", "float32", "full", batch=4, heads=2, kv_heads=1, head_dim=32, length=64)
    assert cases_of(options) == [first, second]
    assert CASE.flops == 2.5 * 2 * 2 * 4 * 64 * 64 * (16 + 16) / 2
    (decode,) = cases_of(parse([str(ROOT), "--device", "cpu", "--decode", "--head-dims", "16"]))
    assert (decode.which, decode.flops) == ("decode", 2 * 2 * 4 * 1 * 128 * (16 + 16))


def test_two_checkouts_side_by_side(tmp_path, capsys):
    (tmp_path / "packages").mkdir()
    trees = [str(ROOT), f"{ROOT}:{tmp_path / 'packages'}"]
    more = ["--passes", "forward", "both", "--groups", "2", "--out", str(tmp_path / "rows")]
    assert compare_trees.main([*trees, *SMALL, *more]) == 0
    frame = pd.read_csv(tmp_path / "rows" / "results.csv")
    assert list(frame["tree"]) == trees * 2
    assert list(frame["which"]) == ["forward", "forward", "both", "both"]
    assert (frame["median_ms"] > 0).all()
    assert list(frame["over_first"])[::2] == [1, 1]
    assert "| naive forward float32 causal d 16 length 64 " in capsys.readouterr().out
    assert compare_trees.main([*trees[:1], *SMALL, "--decode", "--out", str(tmp_path / "decode")]) == 0


def test_a_checkout_that_computes_wrong_is_not_timed_and_the_others_are(wrong, tmp_path):
    arguments = [*SMALL, "--providers", "tiled", "--passes", "forward", "--out", str(tmp_path / "rows")]
    assert compare_trees.main([str(ROOT), str(wrong), *arguments]) == 1
    frame = pd.read_csv(tmp_path / "rows" / "results.csv")
    assert list(frame["status"]) == ["ok", "error"]
    reason = "prepare: AssertionError: forward: expected a relative error of at most 2e-05"
    assert f"{wrong}: {reason}" in frame["reason"][1]
    assert "| error |" in " ".join(tables(frame).split())


def test_a_process_that_ends_is_a_failure_and_starts_again(tmp_path):
    options = parse([str(ROOT), *SMALL])
    (tmp_path / "einops.py").write_text("raise SystemExit(7)")
    with contextlib.closing(Tree(f"{ROOT}:{tmp_path}")) as tree:  # packages precede the installed ones
        with pytest.raises(TreeError, match="prepare: its process ended with 7"):
            tree.ask("prepare", CASE, options)
        (tmp_path / "einops.py").unlink()
        assert tree.ask("time", CASE, options) > 0  # in a new process
        with pytest.raises(TreeError, match="prepare: KeyError: 'float64'"):
            tree.ask("prepare", TreeCase(**CASE.columns | {"dtype": "float64"}), options)
        options.timeout = 0.01  # seconds; the check takes many
        with pytest.raises(TreeError, match="its process ended with -9"):
            tree.ask("prepare", TreeCase(**CASE.columns | {"length": 4096}), options)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ([], "TREE must name at least one checkout"),
        (["/nowhere"], "TREE must be a checkout"),
        ([f"{ROOT}:/nowhere"], "PACKAGES must be a folder"),
        ([str(ROOT)] * 2, "named once"),
    ],
)
def test_trees_that_cannot_be_compared(trees, message, capsys):
    with pytest.raises(SystemExit):
        parse([*trees, "--device", "cpu"])
    assert message in capsys.readouterr().err
