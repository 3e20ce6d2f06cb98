"""What benchmarks of whole models have in common: cells are listed, chosen, measured alone, and kept."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass

import pytest

from benchmarks import nursery, suite
from benchmarks.cell_filter import chosen
from benchmarks.suite import Estimate, Tool, add_run_options, check_run_options, listing, run
from cs336_systems.profiling.sweep import Outcome, Status

GIB = 2**30


@dataclass(frozen=True)
class Cell:
    number: int

    @property
    def key(self) -> str:
        return f"cell {self.number}"


def squared(job):
    cell, offset = job
    if cell.number == 13:
        raise RuntimeError("no such cell")
    return {"status": "ok", "reason": "", "square": cell.number**2 + offset}


def tool(**changes):
    fields = {
        "program": "squares.py",
        "measure": squared,
        "conditions": 1,
        "finish": lambda cell, measured, environment: {"number": cell.number, **measured},
        "write": lambda folder, rows, environment: (folder / "rows.txt").write_text(str([*map(dict, rows)])),
        "configuration": {"offset": 1},
    }
    return Tool(**fields | changes)


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_run_options(parser, "results/squares")
    parsed = parser.parse_args(["--device", "cpu", *map(str, arguments)])
    check_run_options(parser, parsed)
    return parsed


CELLS = [Cell(number) for number in (2, 3, 13)]


def rows_in(folder):
    return [json.loads(line)["rows"][0] for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_rows_are_measured_in_processes_of_their_own(tmp_path):
    drawn = []
    asked = options("--output", tmp_path, "--commit", "abc")
    assert run(tool(draw=lambda folder, rows: drawn.append(len(rows))), asked, CELLS) == 0
    rows = rows_in(tmp_path)
    assert [row.get("square") for row in rows] == [5, 10, None]
    assert [row["status"] for row in rows] == ["ok", "ok", "error"]
    assert "no such cell" in rows[2]["reason"]
    assert {row["commit"] for row in rows} == {"abc"}
    assert "'square': 10" in (tmp_path / "rows.txt").read_text()
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] == "abc"
    assert drawn == [3]


def born(job):
    return {"status": "ok", "reason": "", "imported": "wave" in sys.modules, "parent": os.getppid()}


@pytest.mark.skipif(not nursery.HERE, reason="processes are forked on Linux alone")
def test_rows_begin_with_what_a_tool_preloads(tmp_path):
    preloading = tool(measure=born, preload=("wave",))
    assert preloading.modules == (__name__, "wave")
    assert run(preloading, options("--output", tmp_path), CELLS[:2]) == 0
    rows = rows_in(tmp_path)
    assert [row["imported"] for row in rows] == [True, True]
    assert rows[0]["parent"] == rows[1]["parent"] != os.getpid()


def roots(job):
    cell, _ = job
    return [{"status": "ok", "reason": "", "root": root} for root in (cell.number, -cell.number)]


def test_a_cell_may_have_several_rows(tmp_path, capsys):
    assert run(tool(measure=roots), options("--output", tmp_path), CELLS[:1]) == 0
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    rows = json.loads(line)["rows"]
    assert [(row["number"], row["root"]) for row in rows] == [(2, 2), (2, -2)]
    assert all(row["row_s"] >= 0 for row in rows)
    assert "'root': -2" in (tmp_path / "rows.txt").read_text()
    assert "2 of 2 rows have figures" in capsys.readouterr().err


def test_what_is_there_is_kept_and_what_is_skipped_says_why(tmp_path, monkeypatch):
    measured = []

    def noted(measure, job, limit):
        measured.append(job[0].number)
        return measure(job)

    monkeypatch.setattr(suite, "measured_alone", noted)
    assert run(tool(), options("--output", tmp_path), CELLS[:1]) == 0
    seen = []

    def skip(cell, rows):
        seen.append([row["number"] for row in rows])
        return Outcome(Status.SKIPPED, "too odd") if cell.number == 3 else None

    again = options("--output", tmp_path, "--resume")
    assert run(tool(skip=skip), again, [*CELLS[:2], Cell(4)]) == 0
    assert measured == [2, 4]
    assert seen == [[2], [2, 3]]
    assert [row["status"] for row in rows_in(tmp_path)] == ["ok", "skipped", "ok"]


def test_another_configuration_is_not_gone_on_with(tmp_path, capsys):
    assert run(tool(), options("--output", tmp_path), []) == 0
    assert run(tool(configuration={"offset": 2}), options("--output", tmp_path, "--resume"), []) == 2
    assert "squares.py: error" in (said := capsys.readouterr().err)
    assert "offset was 1 and is now 2" in said


def test_an_interruption_loses_nothing(tmp_path, monkeypatch):
    def interrupted(measure, job, limit):
        if job[0].number == 3:
            raise KeyboardInterrupt
        return measure(job)

    monkeypatch.setattr(suite, "measured_alone", interrupted)
    assert run(tool(), options("--output", tmp_path), CELLS) == 130
    assert [row["number"] for row in rows_in(tmp_path)] == [2]
    assert "'number': 2" in (tmp_path / "rows.txt").read_text()


def test_a_dry_run_lists_what_would_be_measured(tmp_path, capsys):
    asked = options("--output", tmp_path / "none", "--dry-run", "--filter", "[23]$")
    assert run(tool(estimate=lambda cell: Estimate(40.0 * cell.number, cell.number * GIB)), asked, CELLS) == 0
    assert capsys.readouterr().out.splitlines() == [
        "cell 2: 1 min 20 s, 2.00 GiB",
        "cell 3: 2 min 00 s, 3.00 GiB",
        "cell 13: 8 min 40 s, 13.0 GiB",
        "3 rows, 12 min 00 s",
    ]
    assert not (tmp_path / "none").exists()


def test_what_is_unknown_is_said():
    assert listing(CELLS[:1]) == "cell 2: time unknown, memory unknown\n1 rows, time unknown"


def test_the_filter_is_found_anywhere_in_the_name():
    assert chosen(CELLS, re.compile("3")) == CELLS[1:]
    assert chosen(CELLS, None) == CELLS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--filter", "("], "--filter must be a regular expression"), (["--device", "toaster"], "got toaster")],
)
def test_options_that_mean_nothing_end_the_program(arguments, said, capsys):
    with pytest.raises(SystemExit):
        options(*arguments)
    assert said in capsys.readouterr().err.replace("'", "")
