"""Checkouts compared: each computes with its own library, is checked, and is timed in turns."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks import compare_trees
from benchmarks.compare_trees import Tree, TreeCase, TreeError, cases_of, parse, tables
from benchmarks.parts import tree_worker

from .small_models import measure_here

ROOT = Path(__file__).resolve().parents[2]
CASE = TreeCase("naive", "backward", "float32", "causal", batch=2, heads=4, kv_heads=2, head_dim=16, length=64)
SMALL = ["--device", "cpu", "--lengths", "64", "--head-dims", "16", "--providers", "naive", "--rounds", "2"]
WORKER = """
import json, pathlib, sys, time
import package
print("noise", file=sys.stderr)
for line in sys.stdin:
    request = json.loads(line)
    if request["case"]["provider"] == "slow":
        time.sleep(60)
    wrong = request["case"]["provider"] == package.WRONG
    print(json.dumps({"failure": "ValueError: wrong"} if wrong else {"value": package.MS}), flush=True)
"""


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A worker without torch, and the folder of its package, whose times are 2 ms."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(compare_trees, "WORKER", tmp_path / "worker.py")
    return package(tmp_path / "usual", 2.0)


def package(folder, milliseconds, wrong=""):
    folder.mkdir()
    (folder / "package.py").write_text(f"MS, WRONG = {milliseconds}, {wrong!r}")
    return folder


def test_cases():
    sizes = ["--head-dims", "16", "32", "--lengths", "64", "--masks", "full", "--groups", "2"]
    options = parse([str(ROOT), "--passes", "forward", "--device", "cpu", *sizes])
    first = TreeCase("tiled", "forward", "float32", "full", batch=4, heads=4, kv_heads=2, head_dim=16, length=64)
    second = TreeCase("tiled", "forward", "float32", "full", batch=4, heads=2, kv_heads=1, head_dim=32, length=64)
    assert cases_of(options) == [first, second]
    assert CASE.flops == 2.5 * 2 * 2 * 4 * 64 * 64 * (16 + 16) / 2
    (decode,) = cases_of(parse([str(ROOT), "--device", "cpu", "--decode", "--head-dims", "16"]))
    assert (decode.which, decode.flops) == ("decode", 2 * 2 * 4 * 1 * 128 * (16 + 16))
    (step,) = cases_of(parse([str(ROOT), "--device", "cpu", "--step", "--head-dims", "16"]))
    weights = 4 * (4 * 64 * 64 + 3 * 64 * 256) + 64 * 4096
    assert (step.which, step.flops) == ("step", 3 * 2 * (128 * 2 * weights + 4 * 4 * 64 * 128 * 128 / 2))


def test_two_checkouts_side_by_side(quick, tmp_path, monkeypatch, capsys):
    measure_here(monkeypatch)
    fast, wrong = package(tmp_path / "fast", 1.0), package(tmp_path / "wrong", 1.0, "naive")
    trees = [f"{ROOT}:{folder}" for folder in (quick, fast, wrong)]
    assert compare_trees.main([*trees, *SMALL, "--passes", "forward", "--out", str(tmp_path / "rows")]) == 1
    frame = pd.read_csv(tmp_path / "rows" / "results.csv")
    assert [*zip(frame["tree"], frame["status"], strict=True)] == [*zip(trees, ["ok", "ok", "error"], strict=True)]
    assert frame["over_first"].tolist()[:2] == [1, 2]
    assert f"{trees[2]}: prepare: ValueError: wrong" in frame["reason"][2]
    line = next(line for line in tables(frame).splitlines() if "| naive forward float32 causal d 16 length 64 " in line)
    assert [cell.strip().partition(" ")[2] for cell in line.split("|")[2:4]] == [
        "(1.000, 1.000 to 1.000)",
        "(2.000, 2.000 to 2.000)",
    ]
    assert "| error |" in " ".join(line.split())
    assert line in capsys.readouterr().out


def test_a_process_that_ends_is_a_failure_and_starts_again(quick):
    options = parse([str(ROOT), *SMALL])
    right = (quick / "package.py").read_text()
    # Of another size than what is right: Python runs cached bytecode if a file has the same size and second of change.
    (quick / "package.py").write_text("raise SystemExit(7)\n" * 2)
    with contextlib.closing(Tree(f"{ROOT}:{quick}")) as tree:
        with pytest.raises(TreeError, match="prepare: its process ended with 7"):
            tree.ask("prepare", CASE, options)
        (quick / "package.py").write_text(right)
        assert tree.ask("time", CASE, options) == 2  # in a new process
        options.timeout = 0.5
        with pytest.raises(TreeError, match="its process ended with -9"):
            tree.ask("prepare", TreeCase(**CASE.columns | {"provider": "slow"}), options)


@pytest.mark.parametrize("which", ["forward", "backward", "both", "decode"])
def test_a_worker_checks_and_times_every_pass(which):
    case = CASE.columns | {"which": which}
    request = {"case": case, "device": "cpu", "warmup": 0.0, "rep": 1.0}
    assert tree_worker.answer(request | {"do": "prepare"}) == 0
    assert tree_worker.answer(request | {"do": "time"}) > 0
    result = tree_worker.call_of(json.dumps(case), "cpu")()
    shapes = [tuple(x.shape) for x in ([result] if isinstance(result, torch.Tensor) else result)]
    queries, keys = (2, 4, 1 if which == "decode" else 64, 16), (2, 2, 64, 16)
    assert shapes == ([queries] if which in ("forward", "decode") else [queries, keys, keys])


def test_a_worker_trains():
    request = {"case": CASE.columns | {"which": "step"}, "device": "cpu", "warmup": 0.0, "rep": 1.0}
    assert tree_worker.answer(request | {"do": "prepare"}) == 0
    assert tree_worker.answer(request | {"do": "time"}) > 0
    step = tree_worker.call_of(json.dumps(request["case"]), "cpu")
    assert step() > step()


def test_a_worker_refuses_wrong_results(monkeypatch):
    right = tree_worker.attention

    def wrong(*tensors, impl, **how):
        return right(*tensors, impl=impl, **how) * (1.5 if impl == "tiled" else 1)

    monkeypatch.setattr(tree_worker, "attention", wrong)
    request = {"case": CASE.columns | {"provider": "tiled"}, "device": "cpu", "do": "prepare"}
    with pytest.raises(AssertionError, match="forward: expected a relative error of at most 2e-05"):
        tree_worker.answer(request)


@pytest.mark.slow
def test_a_checkout_computes_with_its_own_library(tmp_path):
    tree = tmp_path / "broken"
    shutil.copytree(ROOT / "cs336_systems", tree / "cs336_systems", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "cs336_systems/attention/__init__.py").write_text(
        "def attention(*tensors, **options): raise OSError('mine')"
    )
    arguments = [*SMALL, "--passes", "both", "--out", str(tmp_path / "rows")]
    assert compare_trees.main([str(ROOT), str(tree), *arguments]) == 1
    frame = pd.read_csv(tmp_path / "rows" / "results.csv")
    assert list(frame["status"]) == ["ok", "error"]
    assert "prepare: OSError: mine" in frame["reason"][1]


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
