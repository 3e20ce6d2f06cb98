"""docs/training.md: the options, columns and exit codes that it names are those that there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from cs336_systems.training import __main__ as command
from cs336_systems.training.config import TrainingConfig
from cs336_systems.training.options import read_toml

from .pages import flags, flags_of_training

PAGE = (Path(__file__).parents[2] / "docs/training.md").read_text()


def test_every_flag_that_is_named_exists():
    named = flags(PAGE)
    assert len(named) > 15
    assert named <= flags_of_training()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_file_of_options_is_one(tmp_path):
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "run.toml").write_text(block)
    assert TrainingConfig(**read_toml(tmp_path / "run.toml")).learning_rate == 2e-3


def test_exit_codes():
    table = PAGE[PAGE.index("| exit code |") :]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    signals = {command.SIGNALLED + number for number in (2, 15)}
    assert listed == {0, command.IMPOSSIBLE, command.TOO_LARGE, command.NOT_FINITE, command.NOT_WRITTEN} | signals
