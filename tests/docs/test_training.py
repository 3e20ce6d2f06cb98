"""docs/training.md and README.md: the command, the flags, the files and the exit codes that they name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from cs336_systems.training import __main__ as command

from .pages import examples, flags, flags_of_training

ROOT = Path(__file__).parents[2]
PAGE, README = (ROOT / "docs/training.md").read_text(), (ROOT / "README.md").read_text()
SMALL = "--d-model 16 --d-ff 16 --num-layers 1 --num-heads 1 --steps 1 --batch-size 2 --sample-tokens 20 --device cpu"


def test_every_flag_that_is_named_exists():
    named = flags(PAGE)
    assert len(named) > 15
    assert named <= flags_of_training()


@pytest.mark.parametrize("page", [PAGE, README], ids=["training", "README"])
def test_the_first_command_and_its_example_run(page, monkeypatch, tmp_path, capsys):
    """Of a smaller model, for a step."""
    (line,) = re.findall(r"^python -m cs336_systems\.training (--data README.*)$", page, re.MULTILINE)
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/training.md"):
        (tmp_path / name).write_text(PAGE)
    monkeypatch.chdir(tmp_path)
    words = [word for each in shlex.split(line) for word in (map(str, Path().glob(each)) if "*" in each else [each])]
    assert command.main([*words, *SMALL.split()]) == 0
    written = {path.name for path in (tmp_path / "runs/first").iterdir()}
    table = PAGE[PAGE.index("## The run's folder") :]
    assert written <= {name.split("/")[0] for name in re.findall(r"`([^`]+)`", table)}
    capsys.readouterr()
    exec(next(example for example in examples(page) if "load_run" in example), {})
    assert capsys.readouterr().out


def test_exit_codes():
    table = PAGE[PAGE.index("| exit code |") :]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert listed == {0, command.FAILED, command.UNUSABLE, command.SIGNALLED + 2, command.SIGNALLED + 15}
