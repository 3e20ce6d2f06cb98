"""docs/scaling.md: its flags, modes and example are those that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cs336_systems.parallel import MODES

from ..parallel.processes import free_ports
from .pages import examples, flags, flags_of_training

PAGE = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
OF_TORCHRUN = {"--nproc-per-node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint"}


def test_every_flag_that_is_named_exists():
    named = flags(PAGE)
    assert named - OF_TORCHRUN <= flags_of_training()
    assert {"--parallel", "--context-size", "--no-reshard"} <= named


def test_every_mode_has_a_row():
    table = PAGE[PAGE.index("| `--parallel` |") :]
    rows = re.findall(r"^\| `([a-z+]+)` \|", table[: table.index("\n\n")], re.MULTILINE)
    assert ["none", *rows] == list(MODES)


# torch warns of random numbers for DTensor on a CPU.
@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
def test_the_example_runs(monkeypatch):
    (example,) = examples(PAGE)
    (port,) = free_ports(1)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    names: dict[str, object] = {}
    exec(example, names)
    assert not torch.distributed.is_initialized()
