"""tools/figures.py: every measured figure of README.md and docs follows from rows, and what does not is found."""

from __future__ import annotations

import csv
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("tomllib")  # Python 3.11

from tools import figures

ROWS = [("provider", "length", "median_ms", "round_ms"), ("ours", 512, 2.0, "2;4"), ("theirs", 512, 3.016, "3;5")]
TIME = """
[[figures]]
page = "README.md"
text = "takes {} ms at 512"
query = '''select median_ms from "rows.csv" where provider = 'theirs' '''
"""


def found(root: Path, page: str, sources: str = TIME) -> list[str]:
    """The problems of a README.md with this text."""
    folder = root / "docs/results"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(ROWS)
    (root / "README.md").write_text(page)
    (root / "docs/figures.toml").write_text(sources)
    return figures.check(root).problems


def test_figures_of_the_pages_follow_from_rows(capsys):
    status = figures.main([])
    assert status == 0, capsys.readouterr().out


def test_a_figure_is_its_rows_rounded_to_the_decimals_printed(tmp_path):
    assert found(tmp_path, "It takes 3.02 ms\nat 512.\n") == []
    assert found(tmp_path, "It takes 3 ms at 512.\n") == []


def test_a_figure_from_the_packed_rows_of_a_report(tmp_path):
    part = tmp_path / "rows.csv"
    part.write_text("provider,median_ms\ntheirs,3.016\n")
    report = tmp_path / "docs/results/cpu/2025"
    report.mkdir(parents=True)
    with tarfile.open(report / "rows.tar.xz", "w:xz") as packed:
        packed.add(part, "2025-cpu/timing.csv")
        packed.add(part, "2025-cpu/attention/results.csv")
    for name in ("timing.csv", "attention/results.csv"):
        assert found(tmp_path, "It takes 3.02 ms\nat 512.\n", TIME.replace("rows.csv", f"cpu/2025/{name}")) == []
    problems = found(tmp_path, "It takes 3.02 ms\nat 512.\n", TIME.replace("rows.csv", "cpu/2025/memory.csv"))
    assert "memory.csv" in problems[0]


def test_a_wrong_figure(tmp_path):
    assert found(tmp_path, "Fast.\n\nIt takes 3.01 ms at 512.\n") == [
        "README.md:3: 3.01 is printed, its rows give 3.02",
    ]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (TIME.replace("theirs", "others"), "the query gives no rows"),
        (TIME.replace("select median_ms", "select max(length), median_ms"), "2 numbers for 1 figures"),
        (TIME.replace("rows.csv", "lost.csv"), "No such file"),
        (TIME.replace("median_ms", "mean_ms"), "no such column"),
        (TIME.replace("select median_ms", "select provider"), "the query gives ['theirs']"),
        (TIME.replace('"rows.csv"', "(select 3 as median_ms, 'theirs' as provider)"), "names no file of rows"),
    ],
)
def test_a_row_that_is_missing(tmp_path, sources, message):
    problems = found(tmp_path, "It takes 3.02 ms at 512.\n", sources)
    assert message in problems[0]
    assert problems[1:] == ["README.md:1: no rows for 3.02 in docs/figures.toml"]


def test_a_text_that_is_on_the_page_twice_or_no_more(tmp_path):
    assert "found 2 times" in found(tmp_path, "It takes 3.02 ms at 512. That takes 3.02 ms at 512.\n")[0]
    assert "found 0 times" in found(tmp_path, "It takes long.\n")[0]
    assert "found 0 times" in found(tmp_path, "Fast.\n", TIME.replace("README", "LOST"))[0]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("605 TFLOP/s", ["605"]),
        ("0.96 to 1.04", ["0.96", "1.04"]),
        ("twice, 1.18 times or 51 %", ["1.18", "51"]),
        ("2 and 3.5 times,\n4x, 3.2 GiB, 120\nµs", ["2", "3.5", "4", "3.2", "120"]),
        ("torch 1.18 times", ["1.18"]),
        ("| d | TFLOP/s |\n|---|---|\n| 64 | 301 (16) |", ["301", "16"]),
        ("Time in ms:\n\n| d | a | b |\n|--:|--:|--:|\n| 64 | 3 | |\n| 128 | | 1,234 |", ["3", "1,234"]),
        ("| d | a | b |\n|---|---|---|\n| 64 | 3 | 1.5 |", ["3", "1.5"]),
        ("Sizes:\n\n| d | a | b |\n|---|---|---|\n| 64 | 3 | 15 |", []),
        ("at d 64, 512 tokens, 16 × 8,192, 64 x 16, FlashAttention-3", []),
        ("torch 2.11, Triton 3.6, 3.7 and 3.8, 4.0.0b36", []),
        ("`1.5 ms` of [rows](1.5.md)\n\n```\n2.5 ms\n```\n", []),
    ],
)
def test_figures_without_rows(tmp_path, text, numbers):
    problems = found(tmp_path, f"It takes 3.02 ms at 512.\n\n{text}\n")
    assert [problem.split()[4] for problem in problems] == numbers
    assert all("no rows for" in problem for problem in problems)


def test_a_number_beside_the_figures_of_a_text_has_no_rows(tmp_path):
    sources = TIME.replace("at 512", "at 512; or 1.5 times")
    assert found(tmp_path, "It takes 3.02 ms at 512; or 1.5 times.\n", sources) == [
        "README.md:1: no rows for 1.5 in docs/figures.toml",
    ]


def test_what_is_not_measured_is_declared(tmp_path):
    sources = f'{TIME}[not-measured."README.md"]\n"pauses of 30 ms" = "a default"\n'
    assert found(tmp_path, "It takes 3.02 ms at 512. After pauses of 30 ms.\n", sources) == []
    assert found(tmp_path, "It takes 3.02 ms at 512.\n", sources) == ["README.md: not found: pauses of 30 ms"]


def test_views_and_ratios_within_rounds(tmp_path):
    sources = """
[views]
ratios = '''
select ratio_within_rounds(theirs.round_ms, ours.round_ms) as ratio
from "rows.csv" as ours join "rows.csv" as theirs using (length)
where ours.provider = 'ours' and theirs.provider = 'theirs' '''
[[figures]]
page = "README.md"
text = "{} times as fast"
query = "select ratio from ratios"
"""
    assert found(tmp_path, "It is 1.375 times as fast.\n", sources) == []
    assert found(tmp_path, "It is 1.508 times as fast.\n", sources) == [
        "README.md:1: 1.508 is printed, its rows give 1.375",
    ]


def test_pages_below_docs_are_searched_but_for_those_that_programs_make(tmp_path):
    for name in ("deep/page.md", "results/h100/README.md", "results/h100/2025/answers/timing.md"):
        path = tmp_path / "docs" / name
        path.parent.mkdir(parents=True)
        path.write_text("7.5 ms\n")
    for name in ("page.md", "h100/page.md", "h100/2025/README.md", "h100/2025/timing.md"):
        (tmp_path / "docs/results" / name).write_text("8.5 ms\n")
    assert found(tmp_path, "It takes 3.02 ms at 512.\n") == [
        "docs/deep/page.md:1: no rows for 7.5 in docs/figures.toml",
        "docs/results/h100/2025/answers/timing.md:1: no rows for 7.5 in docs/figures.toml",
        "docs/results/h100/README.md:1: no rows for 7.5 in docs/figures.toml",
    ]


def test_an_answer_of_a_report_follows_from_its_rows(tmp_path):
    answer = tmp_path / "docs/results/h100/2025/answers/timing.md"
    answer.parent.mkdir(parents=True)
    (tmp_path / "docs/results/h100/2025/timing.csv").write_text("median_ms\n4.26\n")
    answer.write_text("A step takes 4.3 ms.\n")
    sources = """
[[figures]]
page = "docs/results/h100/2025/answers/timing.md"
text = "A step takes {} ms."
query = 'select median_ms from "h100/2025/timing.csv"'
"""
    assert found(tmp_path, "Fast.\n", sources) == []
    answer.write_text("A step takes 4.2 ms.\n")
    assert found(tmp_path, "Fast.\n", sources) == [
        "docs/results/h100/2025/answers/timing.md:1: 4.2 is printed, its rows give 4.3"
    ]


def test_write_puts_in_what_rows_give(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert found(tmp_path, "It takes 3,001.12 ms at 512.\n") != []
    assert figures.main(["--write"]) == 0
    assert (tmp_path / "README.md").read_text() == "It takes 3.02 ms at 512.\n"
