"""docs/comparison.md: the tests that it names exist, and every cell about another library has its source."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()
NOT_FOUND = ("not stated", "part of torch")
"""What needs no source."""


def rows() -> list[list[str]]:
    """The cells of each ability: its name, ours, and those of the other libraries."""
    table = [line for line in PAGE.splitlines() if line.count("|") == 9 and "---" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [row for row in cells if row[0]]


@functools.cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_cells_of_ours_name_tests_that_exist_and_those_of_others_have_sources():
    assert len(rows()) > 25
    for row in rows():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[1])
        assert named or row[1].startswith("no"), row[0]
        assert row[1].count("::") == len(named), row[0]
        assert [f"{path}::{name}" for path, name in named if name not in names_in(path)] == []
        assert len(row) == 8
        for cell in row[2:]:
            assert cell in NOT_FOUND or re.search(r"\[\^\w+\]", cell), cell


def test_sources_are_those_that_cells_cite():
    sources = re.findall(r"^\[\^(\w+)\]:", PAGE, re.MULTILINE)
    cited = set(re.findall(r"\[\^(\w+)\](?!:)", PAGE))
    assert len(sources) == len(set(sources))
    assert set(sources) == cited
