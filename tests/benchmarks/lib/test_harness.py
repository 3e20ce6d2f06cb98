"""The harness: cases are chosen, measured in processes, stored, and never lost."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.lib import flags, harness
from benchmarks.lib.comparison import Context
from benchmarks.lib.results import RowStore

from ..small_models import measure_here, run_here

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Square(harness.Case):
    number: int


def measure(case: Square, context: Context) -> harness.Row:
    if case.number == 13:
        raise NotImplementedError("unlucky")
    if case.number == 66:
        os._exit(6)
    columns = {"square": case.number**2, "earlier": len(context.rows)}
    return columns | {"precision": torch.get_float32_matmul_precision()}


PROGRAM = harness.Program("squares", "Squares", measure, settings=("seed", "rounds"))
CASES = [Square(2), Square(3), Square(13)]


def options(*arguments: object):
    parser = flags.make_parser("", "--rounds 3 --no-tf32")
    return flags.parse(parser, ["--device", "cpu", *map(str, arguments)])


@pytest.fixture
def here(monkeypatch):
    measure_here(monkeypatch)


def rows_in(folder: Path) -> list[harness.Row]:
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [row for line in lines for row in json.loads(line)["rows"]]


def test_a_run_from_cases_to_files(tmp_path):
    chosen = options("--out", tmp_path, "--commit", "abc", "--seed", 4, "--tf32")
    assert harness.run(PROGRAM, chosen, [*CASES, Square(66)]) == 0
    rows = rows_in(tmp_path)
    assert [row["case"] for row in rows] == ["number=2", "number=3", "number=13", "number=66"]
    assert [(row.get("square"), row["status"]) for row in rows[:2]] == [(4, "ok"), (9, "ok")]
    assert [row["earlier"] for row in rows[:2]] == [0, 1]
    assert rows[0]["precision"] == "high"
    assert (rows[2]["status"], rows[2]["reason"]) == ("unsupported", "unlucky")
    assert (rows[3]["status"], rows[3]["reason"]) == ("error", "the process ended with status 6, at: start")
    for row in rows:
        assert (row["commit"], row["seed"], row["torch"]) == ("abc", 4, torch.__version__)
        assert row["case_s"] >= 0
    frame = pd.read_csv(tmp_path / "results.csv")
    assert list(frame.columns) == [*rows[0]]
    assert list(frame["number"]) == [2, 3, 13, 66]
    text = (tmp_path / "tables.md").read_text()
    assert text.startswith("# Squares\n\n- device: ")
    assert "- number=13: unsupported: unlucky" in text
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] == "abc"


@pytest.mark.usefixtures("here")
def test_a_folder_with_rows_is_continued_only_on_request(tmp_path, capsys):
    assert harness.run(PROGRAM, options("--out", tmp_path), CASES[:1]) == 0
    before = (tmp_path / "journal.jsonl").read_bytes()
    assert harness.run(PROGRAM, options("--out", tmp_path), CASES) == 2
    assert "add --resume to continue, or choose another --out" in capsys.readouterr().err
    assert harness.run(PROGRAM, options("--out", tmp_path, "--resume", "--rounds", 9), CASES) == 2
    assert "rounds was 3 and is now 9" in capsys.readouterr().err
    assert (tmp_path / "journal.jsonl").read_bytes() == before
    assert harness.run(PROGRAM, options("--out", tmp_path, "--resume"), CASES) == 0
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(before)
    assert len(rows_in(tmp_path)) == 3


def test_a_run_of_errors_alone_fails(tmp_path):
    assert harness.run(PROGRAM, options("--out", tmp_path), [Square(66)]) == 1
    assert harness.run(PROGRAM, options("--out", tmp_path, "--resume"), [Square(66), Square(2)]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
def test_two_runs_do_not_write_into_one_folder(tmp_path, capsys):
    """As after a killed report, whose program goes on."""
    code = "import sys; from pathlib import Path; from benchmarks.lib.results import RowStore\n"
    code += "store = RowStore(Path(sys.argv[1]), {}, resume=True); print('open', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes
    ) as other:
        assert other.stdout.readline() == "open\n"
        assert harness.run(PROGRAM, options("--out", tmp_path, "--resume"), CASES[:1]) == 2
        assert f"{tmp_path} is written by process {other.pid}: wait for it, or stop it" in capsys.readouterr().err
        other.kill()
    RowStore(tmp_path, {}, resume=True).append("a", [{}])


@pytest.mark.usefixtures("here")
def test_cases_are_visited_in_turns_and_are_one_line_of_the_tables(tmp_path):
    assert harness.run(PROGRAM, options("--out", tmp_path, "--visits", 2), CASES[:2]) == 0
    assert harness.run(PROGRAM, options("--out", tmp_path, "--visits", 3, "--resume"), CASES[:2]) == 0
    rows = rows_in(tmp_path)
    assert [(row["number"], row["visit"]) for row in rows] == [(n, visit) for visit in (1, 2, 3) for n in (2, 3)]
    assert [row["case"] for row in rows] == ["number=2", "number=3"] * 3
    assert json.loads((tmp_path / "results.json").read_text()) == rows
    text = (tmp_path / "tables.md").read_text()
    assert (text.count("| number=2 "), text.count("| number=3 ")) == (1, 1)
    assert "- 3 visits: the median of theirs, in the widest of their intervals" in text


@pytest.mark.usefixtures("here")
def test_filter_and_dry_run_measure_what_they_say_and_nothing_else(tmp_path, capsys):
    folder = tmp_path / "new"
    program = dataclasses.replace(PROGRAM, memory=lambda case, options: case.number * 2**30 or None)
    cases = [Square(0), *CASES]
    assert harness.run(program, options("--out", folder, "--dry-run", "--filter", "=[023]$"), cases) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["number=0", "number=2: 2.00 GiB", "number=3: 3.00 GiB", "3 cases"]
    assert harness.run(program, options("--out", folder, "--filter", "none"), CASES) == 2
    message = "squares.py: error: --filter must match the name of a case, for example 'number=2'; got 'none'"
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, None])
def test_an_interruption_keeps_what_is_measured_and_writes_the_tables(tmp_path, capsys, interrupt):
    before = signal.getsignal(signal.SIGTERM)

    def drive(sweep: harness.Sweep[Square], cases: list[Square]) -> None:
        sweep.rows(cases[0])
        if interrupt:
            raise interrupt
        os.kill(os.getpid(), signal.SIGTERM)

    assert harness.run(PROGRAM, options("--out", tmp_path), CASES, drive) == 130
    assert [row["number"] for row in rows_in(tmp_path)] == [2]
    assert "| number=2 " in (tmp_path / "tables.md").read_text()
    assert f"the same command with --out {tmp_path} --resume continues" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("here")
def test_plots_are_drawn_after_a_run_and_again_from_the_csv(tmp_path, capsys):
    drawn = []
    program = dataclasses.replace(PROGRAM, plots=lambda frame, folder: drawn.append((list(frame["square"]), folder)))
    assert harness.run(program, options("--out", tmp_path, "--no-plots"), CASES[:2]) == 0
    assert drawn == []
    assert harness.run(program, options("--redraw", tmp_path), []) == 0
    assert harness.run(program, options("--out", tmp_path, "--resume"), CASES[:2]) == 0
    assert drawn == [([4, 9], tmp_path)] * 2
    assert harness.run(PROGRAM, options("--redraw", tmp_path), []) == 2
    (tmp_path / "empty").mkdir()
    assert harness.run(program, options("--redraw", tmp_path / "empty"), []) == 2
    assert "--redraw must name a folder with a results.csv" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_a_new_run_has_a_folder_by_device_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert harness.run(PROGRAM, options(), CASES[:1]) == 0
    assert [folder.parent.name for folder in tmp_path.glob("results/squares/*/journal.jsonl")] != []
    assert harness.default_folder("squares", "NVIDIA H100 80GB HBM3").name.startswith("nvidia-h100-80gb-hbm3-20")


EXAMPLE = """
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch

from benchmarks.lib import flags
from benchmarks.lib.harness import Case, Comparison, Context, Program, Row, run, timing_method
from benchmarks.lib.tables import matrix
from cs336_systems.profiling import measure_ms

{}
"""


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs/benchmarking.md").read_text()
    section = text[text.index("## Writing a benchmark") :]
    code = section[section.index("```python\n") + 10 : section.index("\n```\n")]
    (tmp_path / "products.py").write_text(EXAMPLE.format(code))
    monkeypatch.syspath_prepend(tmp_path)
    program = importlib.import_module("products")
    flags = ["--device", "cpu", "--lengths", "8", "16", "--rounds", "2"]
    run_here(monkeypatch, program.main, tmp_path / "rows", *flags)
    frame = pd.read_csv(tmp_path / "rows" / "results.csv")
    assert list(frame["provider"]) == ["matmul", "einsum"] * 2
    assert (frame["median_ms"] > 0).all()
    assert "| einsum   | float32 |" in (tmp_path / "rows" / "tables.md").read_text()
