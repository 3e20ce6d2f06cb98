"""Configs: what they refuse, count and keep; presets."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.attention import Implementation
from cs336_systems.transformer import PRESETS, Transformer, TransformerConfig, preset

COUNTS = {
    ("2025", "small"): 128_625_408,
    ("2025", "medium"): 423_183_360,
    ("2025", "large"): 969_411_840,
    ("2025", "xl"): 1_998_235_200,
    ("2025", "2.7B"): 3_406_809_600,
    ("2025", "wide"): 2_357_814_400,
    ("2026", "small"): 128_625_408,
    ("2026", "medium"): 423_183_360,
    ("2026", "large"): 969_411_840,
    ("2026", "xl"): 3_406_809_600,
    ("2026", "10B"): 12_832_823_808,
    ("2026", "wide"): 2_357_814_400,
}


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_preset_is_counted():
    assert {(suite, name) for suite, names in PRESETS.items() for name in names} == COUNTS.keys()


@pytest.mark.parametrize(("suite", "name"), COUNTS)
def test_parameters_of_presets(suite, name):
    config = preset(name, suite)
    assert config.parameters() == parameters_of(Transformer(config, device="meta")) == COUNTS[suite, name]


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"num_kv_heads": None}, {"tie_embeddings": True}])
def test_parameters_of_other_models(tiny, changes):
    config = tiny(**changes)
    assert config.parameters() == parameters_of(Transformer(config, device="meta"))


def test_presets_take_changes():
    assert preset("small", context_length=128, attn="tiled") == dataclasses.replace(
        preset("small", "2026"), context_length=128, attn="tiled"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xxl",), r"^name must be one of 'small', .* in the suite '2025'; got 'xxl'$"),
        (("10B",), r"in the suite '2025'; got '10B'$"),
        (("small", "2024"), r"^suite must be one of '2025', '2026'; got '2024'$"),
    ],
)
def test_presets_that_there_are_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        preset(*arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"d_model": 0}, ValueError, "d_model must be at least 1; got 0"),
        ({"d_ff": 4.0}, TypeError, "d_ff must be an int; got 4.0 of type float"),
        ({"num_layers": True}, TypeError, "num_layers must be an int; got True of type bool"),
        ({"num_heads": 5}, ValueError, "num_heads must divide d_model, 32; got 5"),
        ({"num_heads": 32}, ValueError, "d_model / num_heads must be even, for RoPE; got 32 / 32"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads, 4; got 3"),
        ({"window": 0}, ValueError, "window must be at least 1; got 0"),
        ({"rope_theta": 0.0}, ValueError, "rope_theta must be positive and finite; got 0.0"),
        ({"norm_eps": float("nan")}, ValueError, "norm_eps must be positive and finite; got nan"),
        ({"norm_eps": "small"}, TypeError, "norm_eps must be a float; got 'small' of type str"),
        ({"tie_embeddings": 1}, TypeError, "tie_embeddings must be a bool; got 1"),
        ({"attn": "fast"}, ValueError, "attn must be one of 'auto', .*; got 'fast'"),
        ({"attn": None}, TypeError, "attn must be one of 'auto', .*; got None"),
    ],
)
def test_what_is_refused(tiny, changes, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        tiny(**changes)


def test_json_there_and_back(tiny, tmp_path):
    config = tiny(window=3, rope_theta=5e5, tie_embeddings=True, attn=Implementation.TILED)
    config.save(tmp_path / "config.json")
    assert TransformerConfig.load(tmp_path / "config.json") == config
    assert json.loads((tmp_path / "config.json").read_text()) == dataclasses.asdict(config)
    assert config.attn == "tiled"


def test_saving_replaces_the_file_in_one_step(tiny, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    tiny().save(path)
    before = path.read_text()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        tiny(window=3).save(path)
    assert path.read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values | {"depth": 3, "bias": True}, r"got unknown \['bias', 'depth'\], missing none$"),
        (lambda values: {"d_model": 32}, r"got unknown none, missing \['vocab_size', 'context_length', 'd_ff', "),
        (lambda values: [values], "must hold a JSON object; got list$"),
        (lambda values: values | {"d_ff": -1}, "^d_ff must be at least 1; got -1$"),
    ],
)
def test_files_that_are_no_config(tiny, tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(change(dataclasses.asdict(tiny()))))
    with pytest.raises(ValueError, match=message):
        TransformerConfig.load(path)


@pytest.mark.parametrize(("window", "pairs"), [(None, 24 * 24 / 2), (24, 24 * 24 / 2), (6, 24 * 6 - 6 * 6 / 2)])
def test_operations_of_a_step(tiny, window, pairs):
    """Six for each weight, and 12 d_model / 2 for each pair that is seen, counted as an area."""
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 40 * 32
    assert tiny(window=window).training_flops_per_token() == 6 * weights + 12 * 32 * 2 * pairs / 24


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"window": 6}, {"tie_embeddings": True}])
@pytest.mark.parametrize("length", [24, 11])
def test_operations_of_every_pair_are_those_that_torch_counts(tiny, changes, length):
    """Of attention as it is written on paper, which computes every score; twice as many in the backward pass."""
    config = tiny(attn="naive", **changes)
    model = Transformer(config)
    token_ids = torch.randint(config.vocab_size, (3, length + 1))
    with FlopCounterMode(display=False) as forward:
        loss = model.loss(token_ids[:, :-1], token_ids[:, 1:])
    expected = 3 * length * config.forward_flops_per_token(length, every_pair=True)
    assert forward.get_total_flops() == pytest.approx(expected, rel=1e-12)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_a_mask_leaves_half_of_the_pairs(tiny):
    every, causal = (tiny().forward_flops_per_token(every_pair=every) for every in (True, False))
    assert every - causal == 2 * 2 * 24 * 32 * 2 / 2  # two layers, two products, of half of 24 keys of 32 channels
    assert tiny().training_flops_per_token() == 3 * causal


def test_operations_of_a_shorter_step(tiny):
    assert tiny().training_flops_per_token(12) == tiny(context_length=12).training_flops_per_token()
    with pytest.raises(ValueError, match=r"^length must be at least 1; got 0$"):
        tiny().training_flops_per_token(0)
