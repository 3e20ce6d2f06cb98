"""Where processes compute: the CPU, over gloo, and two GPUs, over NCCL; and a group of this process alone."""

from __future__ import annotations

import pytest
import torch

from benchmarks.lib.process_groups import free_ports
from cs336_systems.parallel import start

from ..parallel.conftest import place

__all__ = ["place"]


@pytest.fixture
def group_of_one(monkeypatch):
    (port,) = free_ports(1)
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    with start("ddp", torch.device("cpu")) as layout:
        yield layout
