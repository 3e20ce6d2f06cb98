"""Flags and TOML: which wins, what is refused, and that each option is one thing under each of its names."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from cs336_systems.training import TrainingConfig
from cs336_systems.training.options import build_parser, parse, read_toml, resumed

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


@needs_toml
def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('data = ["one", "two"]\nsteps = 7\nlearning-rate = 1\ntie_embeddings = true\nlog-every = 3\n')
    config = parse(["--config", str(file), "--steps", "9", "--no-tie-embeddings"]).config
    assert (config.data, config.steps, config.log_every) == (("one", "two"), 9, 3)
    assert config.learning_rate == 1.0
    assert isinstance(config.learning_rate, float)
    assert config.tie_embeddings is False
    assert config.batch_size == TrainingConfig(data=("x",)).batch_size


@needs_toml
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('data = ["x"]\nstepps = 3', "got unknown stepps"),
        ("steps = ", "is none: "),
        ('data = ["x"]\nsteps = "many"', "steps must be of type int; got 'many' of type str"),
        ('data = ["x"]\nsteps = true', "steps must be of type int; got True"),
        ('data = "x"', "data must be a list of strings; got 'x'"),
        ('data = ["x"]\nlearning_rate = nan', "learning_rate must be finite; got nan"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    (tmp_path / "run.toml").write_text(content)
    with pytest.raises((ValueError, TypeError), match=message):
        parse(["--config", str(tmp_path / "run.toml")])


def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_toml(tmp_path / "none.toml")


def test_without_a_toml_reader_the_message_says_what_to_install(tmp_path, monkeypatch):
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="pip install tomli"):
        read_toml(tmp_path / "run.toml")


def test_every_option_is_a_flag_with_a_help_text():
    text = build_parser().format_help()
    for field in dataclasses.fields(TrainingConfig):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"]


def test_every_option_comes_back_from_json(tmp_path):
    config = TrainingConfig(data=("a", "b"), grad_clip=0, top_p=0.5, log_to=("wandb",), window=4)
    config.save(tmp_path / "config.json")
    assert TrainingConfig.load(tmp_path / "config.json") == config
    assert config.grad_clip is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "data must be at least one"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0; got -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive; got 0.0"),
        ({"grad_clip": -1.0}, "grad_clip must be positive; got -1.0"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1; got 1.0"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1; got 1.5"),
        ({"min_learning_rate": 1.0}, r"min_learning_rate must be at most learning_rate, 0.003; got 1.0"),
        ({"micro_batch_size": 3}, "micro_batch_size must divide batch_size, 16; got 3"),
        ({"preset": "huge"}, "preset must be one of 'tiny', 'small'.*; got 'huge'"),
        ({"preset": "10B"}, "preset must be one of .*; got '10B'"),
        ({"suite": "1999"}, "suite must be one of '2025', '2026'; got '1999'"),
        ({"attn": "fast"}, "attn must be one of .*; got 'fast'"),
        ({"dtype": "float16"}, "dtype must be one of 'auto', 'float32', 'bfloat16'; got 'float16'"),
        ({"parallel": "tensor"}, "parallel must be one of 'none', 'ddp', .*; got 'tensor'"),
        ({"context_size": -1}, "context_size must be at least 1; got -1"),
        ({"log_to": ("paper",)}, "log_to must be one of 'tensorboard', 'wandb'; got 'paper'"),
    ],
)
def test_wrong_options(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**{"data": ("x",)} | changes)


def test_the_model_of_a_preset_with_changes():
    config = TrainingConfig(
        data=("x",), preset="xl", suite="2026", num_layers=2, context_length=64, tie_embeddings=True
    )
    model = config.model(257)
    assert (model.d_model, model.num_layers, model.context_length, model.vocab_size) == (2560, 2, 64, 320)
    assert model.tie_embeddings
    assert TrainingConfig(data=("x",), vocab_size=10_000).model(257).vocab_size == 10_000
    with pytest.raises(ValueError, match="vocab_size must be at least the tokenizer's 257; got 100"):
        TrainingConfig(data=("x",), vocab_size=100).model(257)


def test_a_resumed_run_may_change_how_processes_share_it():
    config = TrainingConfig(data=("x",), parallel="context", context_size=2)
    changed = resumed(config, {"parallel": "fsdp", "context_size": 0, "reshard": False})
    assert (changed.parallel, changed.context_size) == ("fsdp", None)


@pytest.mark.parametrize(("groups", "micro_batch_size", "expected"), [(1, None, 16), (2, None, 8), (4, 2, 2)])
def test_sequences_at_a_time(groups, micro_batch_size, expected):
    assert TrainingConfig(data=("x",), micro_batch_size=micro_batch_size).micro_batch(groups) == expected


def test_what_a_resumed_run_may_change():
    config = TrainingConfig(data=("x",))
    assert resumed(config, {"steps": 999, "compile": True}).steps == 999
    assert resumed(config, {"batch_size": 16}) == config
    with pytest.raises(ValueError, match="batch_size must stay 16 in a resumed run; got 8"):
        resumed(config, {"batch_size": 8})
