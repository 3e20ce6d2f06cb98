"""docs/measuring/precision.md: its example runs, and its flags, columns and sums are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.precision_report import COLUMNS

from benchmarks import precision
from cs336_systems.profiling import ACCUMULATIONS

from .pages import flags

PAGE = (Path(__file__).parents[2] / "docs/measuring/precision.md").read_text()


def named_in(title):
    """What the first cells of a section's table name."""
    section = PAGE[PAGE.index(f"\n## {title}\n") :]
    table = section[section.index("\n| ") + 1 :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_flag_that_is_named_exists():
    assert len(flags(PAGE)) > 6
    assert flags(PAGE) <= {flag for action in precision.build_parser()._actions for flag in action.option_strings}


def test_every_column_that_is_named_exists_and_every_other_is_one_of_those_results():
    named = set(named_in("Columns"))
    assert named <= set(COLUMNS)
    unnamed = {re.sub(r"^(lse|dq|dk|dv)_", "out_", column) for column in COLUMNS} - named
    assert unnamed == set()


def test_every_sum_is_named():
    assert named_in("Sums") == [way.name for way in ACCUMULATIONS]
