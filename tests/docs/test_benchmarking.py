"""docs/benchmarking.md: the flags, models, modes and columns of the benchmarks of training are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import scaling, scaling_report, training_report, training_step
from benchmarks.training_models import COMPILE, MODELS

from .pages import flags

PAGE = (Path(__file__).parents[2] / "docs/benchmarking.md").read_text()


def section(title):
    begin = PAGE.index(f"\n## {title}\n")
    return PAGE[begin : PAGE.index("\n## ", begin + 1)]


@pytest.mark.parametrize(("title", "benchmark"), [("Training steps", training_step), ("Several GPUs", scaling)])
def test_every_flag_that_is_named_exists(title, benchmark):
    named = flags(section(title))
    assert len(named) > 6
    assert named <= {flag for action in benchmark.build_parser()._actions for flag in action.option_strings}


@pytest.mark.parametrize(
    ("title", "columns"),
    [("Training steps", training_report.COLUMNS), ("Several GPUs", scaling_report.COLUMNS)],
)
def test_every_column_that_is_named_exists(title, columns):
    text = section(title)
    table = text[text.index("| column |") :]
    cells = re.findall(r"^\| (`.*?) \|", table[: table.index("\n\n")], re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 10
    assert named <= set(columns)


def test_every_model_and_way_to_compile_is_named():
    text = section("Training steps")
    assert re.findall(r"^\| `([a-z][a-z-]*)` \| ", text[: text.index("`--compile model")], re.MULTILINE) == list(MODELS)
    assert all(f"`--compile {how}`" in text for how in COMPILE)
