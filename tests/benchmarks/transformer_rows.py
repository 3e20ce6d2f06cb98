"""Rows of the benchmark of a model's passes, as if they had been measured."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.training_models import config_of
from benchmarks.transformer_cell import Cell, Conditions, row_of
from cs336_systems.profiling.environment import collect_environment

CPU = torch.device("cpu")
CONFIG = config_of("tiny", "2025", "naive", vocab_size=64, context_length=16)
CELL = Cell("tiny", CONFIG, 2, "float32", "none", "step", 1)
CONDITIONS = Conditions(CPU, steps=2, seed=0)
ENVIRONMENT = dataclasses.replace(collect_environment(CPU, commit="abc"), device="NVIDIA H200")


def found(forward=2.0, backward=None, optimizer=None, *, spread=0.0, peak=None):
    """What a process returns of steps with these times, of which the second of two takes a little more."""
    row = {"status": "ok", "reason": "", "first_loss": 4.0, "last_loss": 4.0, "peak_mib": peak}
    times = {"forward": forward, "backward": backward, "optimizer": optimizer}
    times = {name: time for name, time in times.items() if time is not None}
    for name, time in (times | {"step": sum(times.values())}).items():
        numbers = {"mean": time, "std": spread, "min": time - spread, "max": time + spread, "median": time}
        row |= {f"{name}_{each}_ms": number for each, number in numbers.items()}
        row |= {f"{name}_cv": spread / time, f"{name}_each_ms": [time - spread, time + spread]}
    return row | {"warmup_ms": [50.0], "first_step_ms": 50.0, "allocated_mib": None, "reserved_mib": None}


def row_with(measured=None, **changes):
    """The row of a cell with changes, its context among them."""
    context, attn = changes.pop("context", 16), changes.pop("attn", "naive")
    config = dataclasses.replace(CONFIG, context_length=context, attn=attn)
    cell = dataclasses.replace(CELL, config=config, **changes)
    row = row_of(cell, found() if measured is None else measured, ENVIRONMENT, CONDITIONS)
    return row | {"device": "NVIDIA H200", "commit": "abc", "date": "today", "row_s": 1.0}
