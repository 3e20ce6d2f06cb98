"""What is measured by default depends on the device that is asked for, whatever else the machine has."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.asked_device import asks_for_gpu

TREE = str(Path(__file__).parents[2])
PROGRAMS = {
    "attention": [],
    "compare_trees": [TREE],
    "features": [],
    "generation": [],
    "scaling": [],
}
"""The programs that have defaults for a GPU, and what they must be told."""


@pytest.mark.parametrize("there_is_one", [False, True])
def test_asked(monkeypatch, there_is_one):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_one)
    monkeypatch.setattr("sys.argv", ["program", "--device", "cuda"])
    assert asks_for_gpu(["--device", "cuda:1", "--rounds", "2"])
    assert asks_for_gpu(None)
    assert not asks_for_gpu(["--length", "8", "--device=cpu"])
    assert not asks_for_gpu(["--device", "mps"])
    assert asks_for_gpu([]) is there_is_one
    assert asks_for_gpu(["--device", "auto", "--unknown"]) is there_is_one


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cpu_is_asked_for_the_same_with_and_without_a_gpu(monkeypatch, name):
    module = importlib.import_module(f"benchmarks.{name}")

    def asked(there_is_one):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there_is_one)
        return module.parse([*PROGRAMS[name], "--device", "cpu"])

    assert asked(there_is_one=True) == asked(there_is_one=False)
