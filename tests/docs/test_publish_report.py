"""The pages of a report in the repository, with what they link to, and its rows in one file."""

from __future__ import annotations

import tarfile

import pandas as pd
import pytest
from markdown_it import MarkdownIt

from cs336_systems.profiling.report import markdown_table
from tools import publish_report

ROWS = (
    "case,model,batch,length,parameters,mode,warmup_steps,status,median_ms,steps_ms\n"
    "a,small,4,128,9,step,0,ok,2.5,2.5;2.5\n"
)


@pytest.fixture
def report(tmp_path):
    """A part whose rows answer a question, and one whose tables are a page."""
    folder = tmp_path / "results/2025"
    for name in ("transformer-warmup", "host"):
        (folder / name / "details").mkdir(parents=True)
        (folder / name / "results.csv").write_text(ROWS)
        (folder / name / "environment.json").write_text('{"command": "python a.py"}')
        (folder / name / "tables.md").write_text("# A\n\n| a     |\n|:------|\n| wider |\n")
        for file in ("journal.jsonl", "results.json", "settings.json", "log.txt", ".lock", "details/a.md"):
            (folder / name / file).write_text("{}\n")
    return folder


def test_pages_and_what_they_link_to_are_published_and_the_rest_is_packed(report, tmp_path, capsys):
    target = tmp_path / "docs"
    (target / "answers").mkdir(parents=True)
    (target / "answers/warm-up.md").write_text("Much.\n")
    for _ in range(2):  # the second time in place of the first
        assert publish_report.main([str(report), str(target)]) == 0
        found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
        assert found == {
            *("report.md", "warm-up.md", "answers/warm-up.md", "rows.tar.xz", "host.md", "host/tables.md"),
            *("transformer-warmup/tables.md", "warm-up-steps.png"),
        }
        (target / "old.md").touch()
    assert "8 files, 0.0 MiB in" in capsys.readouterr().out
    page = (target / "warm-up.md").read_text()
    assert "Much." in page
    assert (target / "host/tables.md").read_text() == "# A\n\n| a |\n|:-|\n| wider |\n"
    assert "Rows: [warm-up.csv](rows.tar.xz), [warm-up.json](rows.tar.xz)" in page
    with tarfile.open(target / "rows.tar.xz") as packed:
        names = {name.removeprefix("2025/host/") for name in packed.getnames() if name.startswith("2025/host/")}
        files = {"results.csv", "tables.md", "environment.json", "journal.jsonl", "settings.json", "details/a.md"}
        assert names == files
        for name in ("host/results.csv", "warm-up.csv"):
            assert pd.read_csv(packed.extractfile(f"2025/{name}"))["median_ms"].tolist() == [2.5]
        assert "2025/warm-up.json" in packed.getnames()


def test_tables_take_less_room_and_are_shown_the_same():
    table = markdown_table(
        ["name", "ms, with an interval"], [["a -- b", "1"], ["`longer  | name`", "2.50 (2.49 to 2.51)"]]
    )
    page = f"# A\n\nWords,  as they were ----\n\n{table}\n"
    narrow = publish_report.narrow(page)
    assert len(narrow) < len(page)
    assert narrow.startswith("# A\n\nWords,  as they were ----\n")
    assert "| a -- b | 1 |" in narrow
    converter = MarkdownIt("commonmark").enable("table")
    assert converter.render(narrow) == converter.render(page)


def test_nothing_is_removed_from_a_folder_that_is_no_published_report(report, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    assert publish_report.main([str(report), str(other)]) == 2
    assert "target must be a new folder, or have a rows.tar.xz" in capsys.readouterr().err
    assert publish_report.main([str(other), str(tmp_path / "new")]) == 2
    assert "report must have folders with a results.csv" in capsys.readouterr().err
    assert (other / "kept").exists()
