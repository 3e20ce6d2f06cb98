"""docs/measuring/memory.md: its flags, columns and files are those that there are, and its examples run."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.memory_cell import DTYPES, MODELS, MODES, PICTURES, SNAPSHOTS
from benchmarks.memory_report import COLUMNS

from benchmarks import memory, memory_plots
from cs336_systems.profiling.memory import ALLOCATOR
from cs336_systems.profiling.recording import TRACKED_TENSORS

from .pages import flags

PAGE = (Path(__file__).parents[2] / "docs/measuring/memory.md").read_text()


def test_every_flag_is_named_and_exists():
    there = {flag for action in memory.build_parser()._actions for flag in action.option_strings if "--" in flag}
    assert flags(PAGE) - {"--steps"} == there - {"--help", "--steps"}


def test_every_column_that_is_named_exists():
    table = PAGE[PAGE.index("| column |") :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 15
    assert named <= set(COLUMNS)
    assert {column for column in COLUMNS if column.endswith("_bytes")} <= named


def test_names_and_files_are_those_of_the_program():
    for name in (*MODES, *DTYPES, *MODELS, ALLOCATOR, TRACKED_TENSORS):
        assert f"`{name}`" in PAGE, name
    for name in (memory_plots.PEAKS, memory_plots.CATEGORIES_OF_PEAK, memory_plots.CHECKPOINTING):
        assert f"`{name}`" in PAGE
    assert f"`{PICTURES}/*.html`" in PAGE
    assert f"`{SNAPSHOTS}/*.pickle`" in PAGE
