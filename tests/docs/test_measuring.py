"""docs/measuring: examples run, without benchmarks imported; what the page of the report names exists."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from .pages import examples, flags

FOLDER = Path(__file__).parents[2] / "docs/measuring"
PRINTED = {
    "attention-memory": ["saved with 0         32.5 MiB", "\n2.0\n"],
    "breakdown": ["matrix products", "milliseconds"],
    "memory": ["saved tensors", "peak after event ", "optimizer state", "tracked tensors"],
    "precision": ["float16 9.953125\n", "loss   torch.float32", "dv   largest error"],
    "report": ["# Benchmarks: r", "attention-mine.html"],
    "steps": ["forward ", "backward ", "optimizer "],
}
FILES = {
    "breakdown": ["trace.json"],
    "memory": ["timeline.png", "snapshot.pickle"],
    "report": ["results/attention-mine.html"],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_example_runs(page, tmp_path, monkeypatch, capsys):
    for module in ("pandas", "matplotlib"):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    (example,) = examples((FOLDER / f"{page}.md").read_text())
    exec(example, {})
    printed = capsys.readouterr().out
    assert [text for text in PRINTED[page] if text not in printed] == []
    assert all((tmp_path / name).exists() for name in FILES.get(page, ()))
    if page == "report":
        assert ">1.5</td>" in (tmp_path / "results/attention-mine.html").read_text()


def test_flags_presets_and_statuses_of_the_report_are_named_and_exist():
    report, page = importlib.import_module("benchmarks.report"), (FOLDER / "report.md").read_text()
    known = {flag for action in report.make_parser()._actions for flag in action.option_strings}
    assert flags(page) <= known
    assert known - flags(page) <= {"-h", "--help", "--plots"}
    first_cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    statuses = {report.OK, report.FAILED, report.TIMED_OUT, report.INTERRUPTED, report.NOT_STARTED}
    questions = {
        question.name: question.title for question in importlib.import_module("benchmarks.parts.questions").QUESTIONS
    }
    assert named == {*report.PRESETS, *statuses, *questions}
    assert all(f"| `{name}` | {title} |" in page for name, title in questions.items())
