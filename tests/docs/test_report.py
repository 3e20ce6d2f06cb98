"""docs/measuring/report.md: its example runs, and its flags, presets and statuses are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import report

from .pages import examples, flags

PAGE = (Path(__file__).parents[2] / "docs/measuring/report.md").read_text()


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = examples(PAGE)
    exec(example, {})
    assert capsys.readouterr().out == "<!DOCTYPE html>\n"
    assert ">1.5</td>" in (tmp_path / "results/report.html").read_text()


def test_every_flag_is_named_and_exists():
    known = {flag for action in report.make_parser()._actions for flag in action.option_strings}
    assert flags(PAGE) <= known
    assert known - flags(PAGE) <= {"-h", "--help", "--plots"}


def test_every_preset_and_status_is_named():
    first_cells = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    statuses = {report.OK, report.FAILED, report.TIMED_OUT, report.INTERRUPTED, report.NOT_STARTED}
    assert named == {*report.PRESETS, *statuses}
