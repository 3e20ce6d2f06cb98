"""A small text, and runs of a model that learns it in seconds."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.parallel import Layout
from cs336_systems.training import Trainer, TrainingConfig
from cs336_systems.training.data import prepare
from cs336_systems.training.loop import read_metrics

SIZES = {"context_length": 16, "d_model": 32, "d_ff": 48, "num_layers": 1, "num_heads": 2}
INTERVALS = {"log_every": 1, "eval_every": 3, "sample_every": 0, "checkpoint_every": 2}
SMALL = {**SIZES, **INTERVALS, "steps": 6, "batch_size": 4, "warmup_steps": 2, "eval_sequences": 4, "device": "cpu"}


def rows_of(folder, kind="train"):
    """The rows of a run's metrics, of one kind."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == kind]


@pytest.fixture
def text(tmp_path):
    """A folder with two short texts."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 20)
    (folder / "b.txt").write_text("one two three four five six seven eight nine ten. " * 20)
    return folder


@pytest.fixture
def options(text):
    """Makes the options of a small run: ``options(steps=2)``."""
    return lambda **changes: TrainingConfig(**{"data": [str(text)], "sample_tokens": 10} | SMALL | changes)


@pytest.fixture
def flags(text):
    """Makes the same options as flags: ``flags(steps=2)``."""

    def make(**changes) -> list[str]:
        values = {"data": text, "sample_tokens": 10} | SMALL | changes
        return [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]

    return make


@pytest.fixture
def begin(tmp_path, options):
    """Makes the Trainer of a run in a folder: ``begin("name", resume=checkpoint, steps=2)``."""

    def make(name="run", resume=None, **changes):
        config, folder = options(**changes), tmp_path / name
        if resume is None:
            prepare(config, folder)
        return Trainer(config, folder, Layout(torch.device(config.device)), resume)

    return make
