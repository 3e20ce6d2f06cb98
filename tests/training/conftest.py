"""What tests of training share: a small text, and the options of a model that learns it in seconds."""

from __future__ import annotations

import pytest

from cs336_systems.training import TrainingConfig

SMALL = {
    "context_length": 16,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 2,
    "steps": 6,
    "batch_size": 4,
    "warmup_steps": 2,
    "log_every": 1,
    "eval_every": 3,
    "eval_sequences": 4,
    "sample_every": 0,
    "sample_tokens": 10,
    "checkpoint_every": 2,
    "device": "cpu",
    "plot": False,
}


@pytest.fixture
def text(tmp_path):
    """A folder with two short texts."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat and the dog sat on the log. " * 20)
    (folder / "b.txt").write_text("one two three four five six seven eight nine ten. " * 20)
    return folder


@pytest.fixture
def options(text, tmp_path):
    """The options of a small run, with changes: ``options(steps=2)``."""
    places = {"data": (str(text),), "tokens": str(tmp_path / "tokens")}
    return lambda **changes: TrainingConfig(**places | SMALL | changes)


@pytest.fixture
def flags(text, tmp_path):
    """The same as flags, with changes."""

    def make(**changes) -> list[str]:
        values = {"data": text, "tokens": tmp_path / "tokens"} | SMALL | changes
        pairs = [[f"--{name.replace('_', '-')}", str(value)] for name, value in values.items() if name != "plot"]
        return ["--no-plot", *(word for pair in pairs for word in pair)]

    return make
