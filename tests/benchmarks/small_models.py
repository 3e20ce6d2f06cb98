"""Small models for the tests of benchmarks that measure models, and runs of these in this process."""

from __future__ import annotations

import argparse
import csv
import dataclasses
from pathlib import Path

import torch

from benchmarks.lib import attention_providers, harness
from benchmarks.lib.comparison import Context
from benchmarks.lib.isolation import Finished
from benchmarks.lib.models import ModelCase
from cs336_systems.transformer import TransformerConfig

CPU = torch.device("cpu")
CONFIG = TransformerConfig(
    vocab_size=64, context_length=16, d_model=32, d_ff=64, num_layers=2, num_heads=2, attn="naive"
)
CASE = ModelCase("small", "2025", CONFIG, 2, "naive", "float32", False)
FLAGS = ["--device", "cpu", "--models", "tiny", "--d-model", "32", "--d-ff", "64", "--num-layers", "2"]
FLAGS += ["--vocab-size", "64", "--lengths", "16", "--commit", "abc"]


def changed(case: ModelCase = CASE, **changes):
    """The case with other fields, or other attributes of its config."""
    config = {name: changes.pop(name) for name in list(changes) if hasattr(CONFIG, name)}
    if "provider" in changes:
        config["attn"] = {"torch": "sdpa", "llama": "sdpa", "torch-cudnn": "sdpa"}.get(*[changes["provider"]] * 2)
    changes.setdefault("config", dataclasses.replace(case.config, **config))
    return dataclasses.replace(case, **changes)


def context(out: Path | None = None, rows=(), **options):
    """The context of a measuring function."""
    fixed = {"device": CPU, "seed": 0, "steps": 2, "most_steps": None, "tf32": False, "out": out, "plots": False}
    return Context(argparse.Namespace(**fixed | options), rows)


def measured(measure, case, *arguments, **options):
    """The row of a case, measured in this process; a failure is a row."""
    (row,) = harness.measure_here(measure, case, context(*arguments, **options))
    return row


def measure_here(monkeypatch) -> None:
    """Let programs measure in this process, which takes a tenth of the time."""
    for module in (harness, attention_providers):
        monkeypatch.setattr(module, "run_isolated", lambda function, *arguments, **how: Finished(function(*arguments)))


def run_here(monkeypatch, main, folder: Path, *arguments: str) -> list[dict[str, str]]:
    """Run a program with its cases measured in this process; the rows of results.csv."""
    measure_here(monkeypatch)
    assert main([*arguments, "--out", str(folder)]) == 0
    with (folder / "results.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def out_of_memory(*arguments, **options):
    """Raise what torch raises if memory runs out."""
    raise torch.OutOfMemoryError("CUDA out of memory")
