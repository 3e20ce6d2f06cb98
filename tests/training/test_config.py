"""Options: their ranges, their flags, and which of them a resumed run can change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cs336_systems.training import TrainingConfig
from cs336_systems.training.config import build_parser

DATA = {"data": ["x"]}


def test_flags_become_options_and_missing_ones_keep_their_defaults():
    flags = "--data a b --steps 9 --no-reshard --window 4 --learning-rate 1 --grad-clip 0"
    config = TrainingConfig(**vars(build_parser().parse_args(flags.split())))
    assert (config.data, config.steps, config.reshard, config.window) == (("a", "b"), 9, False, 4)
    assert (config.grad_clip, type(config.learning_rate)) == (None, float)
    assert vars(build_parser().parse_args([])) == {}
    text = build_parser().format_help()
    assert all(f"--{field.name.replace('_', '-')}" in text for field in dataclasses.fields(TrainingConfig))


def test_options_come_back_from_json(tmp_path):
    config = TrainingConfig(data=["a", "b"], grad_clip=0, top_p=0.5, window=4)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    assert TrainingConfig.load(tmp_path / "config.json") == config
    for content in (b"{", b"[1]", b"\xff", b'{"data": ["x"], "stepps": 3}', b'{"data": []}'):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json must hold the options of a training run: "):
            TrainingConfig.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "data must be at least one file or folder; got none"),
        ({"steps": 0}, "steps must be from 1 to 99999999; got 0"),
        ({"loss_chunk": 2**70}, "loss_chunk must be from 1"),
        ({"context_size": -1}, "context_size must be from 1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0; got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and finite; got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be positive and finite; got nan"),
        ({"grad_clip": -1.0}, "grad_clip must be positive and finite; got -1.0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1; got 1.0"),
        ({"seed": 2**64}, "seed must be from 0 to"),
        ({"top_p": 1.5}, "top_p must be at most 1; got 1.5"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"min_learning_rate": 1.0}, "min_learning_rate must be at most learning_rate; got 1.0"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16; got float16"),
    ],
)
def test_options_out_of_range(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**DATA | changes)


def test_the_model_of_a_preset_with_changes():
    config = TrainingConfig(**DATA, preset="xl", suite="2026", num_layers=2, context_length=64, tie_embeddings=True)
    model = config.model(257)
    assert (model.d_model, model.num_layers, model.context_length, model.vocab_size) == (2560, 2, 64, 320)
    assert model.tie_embeddings
    for changes, message in (
        ({"preset": "huge"}, "name must be one of 'small'.*; got 'huge'"),
        ({"attn": "fast"}, "attn must be one of .*; got 'fast'"),
        ({"d_model": 0}, "d_model must be at least 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingConfig(**DATA | changes).model(257)


def test_sequences_per_forward_pass():
    config = TrainingConfig(**DATA, micro_batch_size=2)
    assert [config.micro_batch(4), TrainingConfig(**DATA).micro_batch(2)] == [2, 8]
    with pytest.raises(ValueError, match="batch_size must be a multiple of 3 groups of processes; got 16"):
        config.micro_batch(3)
    with pytest.raises(ValueError, match="micro_batch_size must divide the 1 sequences of each group; got 2"):
        config.micro_batch(16)


def test_what_a_resumed_run_can_change():
    config = TrainingConfig(**DATA, parallel="context", context_size=2)
    changed = config.resumed({"steps": 999, "batch_size": 16, "parallel": "fsdp", "context_size": 0, "reshard": False})
    assert (changed.steps, changed.parallel, changed.context_size) == (999, "fsdp", None)
    with pytest.raises(ValueError, match="batch_size must stay 16 in a resumed run; got 8"):
        config.resumed({"batch_size": 8})
