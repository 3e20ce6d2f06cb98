"""docs/measuring/steps.md: its example runs, and its flags, values and columns are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.training_models import COMPILE

from benchmarks import transformer, transformer_cell, transformer_report
from cs336_systems.attention.dispatch import NAMES
from cs336_systems.profiling.steps import MODES

from .pages import flags

PAGE = (Path(__file__).parents[2] / "docs/measuring/steps.md").read_text()


def test_every_flag_that_is_named_exists_and_every_axis_is_named():
    there = {flag for action in transformer.build_parser()._actions for flag in action.option_strings}
    assert flags(PAGE) <= there
    assert there - flags(PAGE) <= {"--help", "--seed", "--commit", "-h"}


def test_every_column_is_named():
    table = PAGE[PAGE.index("| column |") :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    others = {
        column for column in transformer_report.COLUMNS if column.startswith(("backward_", "optimizer_", "step_"))
    }
    assert named <= set(transformer_report.COLUMNS)
    assert set(transformer_report.COLUMNS) - named <= others


@pytest.mark.parametrize("values", [NAMES, COMPILE, MODES, transformer_cell.DTYPES])
def test_every_value_of_an_axis_is_named(values):
    assert all(f"`{value}`" in PAGE for value in values)


def test_the_sizes_of_the_comparison_are_named():
    assert all(sizes in PAGE for sizes in transformer.COMPARED)
