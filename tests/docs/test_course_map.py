"""docs/measuring/course.md: its parts, commands, pages, tables, columns and files exist."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.parts.questions import QUESTIONS
from benchmarks.parts.report_presets import parts_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/measuring/course.md").read_text()
ITEMS = {"Report 0": 18, "Report 1": 14, "Report 2": 8, "Report 3": 5, "Report 4": 18}
PARTS = {part.name for part in parts_of("2025", gpu=True)}
PREFIXES = r"(forward|backward|optimizer|both|communication|top_no_product)_(?=[a-z])"


def rows(title: str) -> list[list[str]]:
    """The cells of each line of the section whose title begins so."""
    section = PAGE[PAGE.index(f"\n## {title}") + 1 :].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines]


def code(text: str) -> list[str]:
    """What is written as code in a line."""
    return re.findall(r"(?<!`)`([^`\n]+)`", text)


ROWS = [row for title in ITEMS for row in rows(title)] + [["", *row] for row in rows("FlashAttention, and")]


@pytest.mark.parametrize("title", ITEMS)
def test_every_item_has_a_line(title):
    numbers = [int(number) for row in rows(title) for number in row[0].split(",")]
    assert numbers == [*range(1, ITEMS[title] + 1)]
    assert all(len(row) == 5 for row in rows(title))


def test_parts_exist_and_commands_have_their_flags():
    named = [text for row in ROWS for text in code(row[2])]
    remarks = [text for row in ROWS for text in code(row[4]) if ".py " in text]
    commands = [text for text in named if ".py" in text] + remarks
    assert len(commands) > 8
    for command in commands:
        program, *arguments = shlex.split(command)
        module = importlib.import_module(f"benchmarks.{program.removesuffix('.py')}")
        takes = inspect.signature(module.make_parser).parameters
        module.make_parser(*[arguments] * len(takes)).parse_args(arguments)
    for name in set(named) - set(commands):
        assert any(re.fullmatch(name.replace("MODEL", ".+"), part) for part in PARTS), name


def test_tables_exist():
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    titles = {title for row in ROWS for title in re.findall(r"\*([^*]+)\*", re.sub(r"`[^`]+`", "", row[3]))}
    assert len(titles) > 15
    assert [title for title in titles if title not in sources] == []


def test_pages_columns_and_files_are_described():
    pages = [*(ROOT / "docs/measuring").glob("*.md"), ROOT / "docs/benchmarking.md"]
    described = {text for path in pages if path.name != "course.md" for text in code(path.read_text())}
    known = described | {question.name for question in QUESTIONS} | PARTS
    for text in (text for row in ROWS for text in code(row[3])):
        assert {text, re.sub(PREFIXES, "", text), re.sub(r"_(share|ms|instances)$", "", text)} & known, text
