"""docs/training.md, docs/scaling.md and README.md: the command, flags, modes, files and exit codes in them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from benchmarks.lib.process_groups import free_ports
from cs336_systems.parallel import MODES
from cs336_systems.training import __main__ as command

from .pages import examples, flags, flags_of_training

ROOT = Path(__file__).parents[2]
PAGE, SCALING, README = ((ROOT / name).read_text() for name in ("docs/training.md", "docs/scaling.md", "README.md"))
SMALL = "--d-model 16 --d-ff 16 --num-layers 1 --num-heads 1 --steps 1 --batch-size 2 --sample-tokens 20 --device cpu"
OF_TORCHRUN = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}


def test_every_flag_that_is_named_exists():
    assert len(flags(PAGE)) > 15
    assert flags(PAGE) | flags(SCALING) - OF_TORCHRUN <= flags_of_training()
    assert {"--parallel", "--context-size", "--no-reshard"} <= flags(SCALING)


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


def test_every_mode_has_a_row():
    table = SCALING[SCALING.index("| `--parallel` |") :]
    rows = re.findall(r"^\| `([a-z+]+)` \|", table[: table.index("\n\n")], re.MULTILINE)
    assert ["none", *rows] == list(MODES)


# torch warns of random numbers for DTensor on a CPU.
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_the_example_of_scaling_runs(monkeypatch):
    (example,) = examples(SCALING)
    (port,) = free_ports(1)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    names: dict[str, object] = {}
    exec(example, names)
    assert not torch.distributed.is_initialized()
