"""The benchmark of first calls: new processes, whose caches of compiled code are empty, and then filled."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import first_call
from benchmarks.first_call import CACHES, FirstCall, empty_caches, measure
from benchmarks.lib.isolation import Finished

from .small_models import context

SMALL = ["--lengths", "16", "--head-dims", "8", "--batch", "1", "--heads", "2", "--dtypes", "fp32", "--device", "cpu"]
CASE = FirstCall("float32", "causal", 1, 2, 2, 8, 16, "naive")


def test_rows_and_tables(tmp_path):
    arguments = [*SMALL, "--rounds", "2", "--providers", "naive", "fa4", "--out", str(tmp_path)]
    assert first_call.main(arguments) == 0
    frame = pd.read_csv(tmp_path / "results.csv")
    ok = frame[frame["provider"] == "naive"]
    assert list(ok["caches"]) == ["empty", "filled"]
    assert set(ok["calls"]) == {2}
    assert ((ok["forward_s"] > 0) & (ok["backward_s"] > 0)).all()
    assert ((ok["min_s"] <= ok["both_s"]) & (ok["both_s"] <= ok["max_s"])).all()
    assert list(frame[frame["provider"] == "fa4"]["status"]) == ["unsupported"]
    text = (tmp_path / "tables.md").read_text()
    assert "## float32, causal, q (1, 2, 16, 8)" in text
    assert "medians of 2 processes" in text


def test_an_unknown_provider(capsys):
    with pytest.raises(SystemExit):
        first_call.main([*SMALL, "--providers", "naiv"])
    assert "--providers must be of naive, " in capsys.readouterr().err


def test_each_round_has_caches_of_its_own(monkeypatch):
    """The first process of a round finds no file, the second what the first left."""
    seen = []

    def isolated(function, *arguments, limit):
        folders = [Path(os.environ[name]) for name in CACHES]
        seen.append((folders[0], [folder.exists() for folder in folders]))
        for folder in folders:
            folder.mkdir(exist_ok=True)
        return Finished(dict.fromkeys(first_call.PARTS, float(len(seen))))

    monkeypatch.setattr(first_call, "run_isolated", isolated)
    rows = measure(CASE, context(rounds=3, timeout=9.0))
    folders, exist = zip(*seen, strict=True)
    assert list(exist) == [[False] * 3, [True] * 3] * 3
    assert len(set(folders)) == 3
    assert not any(folder.exists() for folder in folders)
    assert [row["both_s"] for row in rows] == [3.0, 4.0]
    assert (rows[0]["min_s"], rows[0]["max_s"]) == (1.0, 5.0)


@pytest.mark.parametrize(
    ("finished", "status"),
    [(Finished(failure="it took longer"), "error"), (Finished({"status": "oom", "reason": "memory"}), "oom")],
)
def test_a_failure_is_the_row(monkeypatch, finished, status):
    monkeypatch.setattr(first_call, "run_isolated", lambda *arguments, limit: finished)
    [row] = measure(CASE, context(rounds=3, timeout=9.0))
    assert row["status"] == status


def test_compilers_take_the_folders():
    triton = pytest.importorskip("triton")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with empty_caches():
        assert os.environ[CACHES[0]] == triton.knobs.cache.dir
        assert cache_dir() == os.environ[CACHES[1]]
    assert not Path(cache_dir()).name.startswith(CACHES[1])
