"""docs/measuring/breakdown.md: its example runs, and flags, columns, classes and modes are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.breakdown_cell import MODES

from benchmarks import breakdown, breakdown_report
from cs336_systems.profiling import regions
from cs336_systems.profiling.kernel_classes import CLASSES

from .pages import flags

PAGE = (Path(__file__).parents[2] / "docs/measuring/breakdown.md").read_text()


def named(header):
    """What stands in code in the first column of the table with this header."""
    table = PAGE[PAGE.index(f"| {header} |") :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_flag_that_is_named_exists():
    found = flags(PAGE)
    assert len(found) > 10
    assert found <= {flag for action in breakdown.build_parser()._actions for flag in action.option_strings}


def test_every_column_that_is_named_exists():
    columns = named("column")
    assert len(columns) > 25
    assert set(columns) <= set(breakdown_report.COLUMNS)
    of_kernels = re.findall(r"`(\w+)`", PAGE[PAGE.index("| `kernels.csv` |") : PAGE.index("| `shares.png` |")])
    assert set(of_kernels) <= {*breakdown_report.KERNEL_COLUMNS, *breakdown_report.REGION_COLUMNS}
    assert len(of_kernels) > 10


def test_every_mode_class_and_region_is_named():
    assert named("mode") == list(MODES)
    assert set(named("class")) == set(CLASSES)
    every = {region for _, region in regions.REGION_RULES} | {*regions.ATTENTION_STEPS, regions.OPTIMIZER, "elsewhere"}
    assert set(named("region")) == every - {"model"}
