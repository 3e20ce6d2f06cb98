"""Configs: validation, counts, JSON, presets."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.attention import Implementation
from cs336_systems.transformer import PRESETS, Transformer, TransformerConfig, preset

SHARED = {"small": 128_625_408, "medium": 423_183_360, "large": 969_411_840, "wide": 2_357_814_400}
COUNTS = {
    "2025": {**SHARED, "xl": 1_998_235_200, "2.7B": 3_406_809_600},
    "2026": {**SHARED, "xl": 3_406_809_600, "8B": 6_962_958_336, "10B": 12_832_823_808},
}


@pytest.mark.parametrize("suite", COUNTS)
def test_parameters_of_presets(suite):
    assert {name: preset(name, suite).parameters() for name in PRESETS[suite]} == COUNTS[suite]


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"num_kv_heads": None}, {"tie_embeddings": True}])
def test_parameters_are_those_of_the_model(tiny, changes):
    config = tiny(**changes)
    model = Transformer(config, device="meta")
    assert config.parameters() == sum(parameter.numel() for parameter in model.parameters())


def test_presets_take_changes():
    changes = {"context_length": 128, "attn": "tiled"}
    assert preset("small", **changes) == dataclasses.replace(preset("small", "2026"), **changes)
    with pytest.raises(ValueError, match=r"^name must be one of 'small', .* in the suite '2025'; got '10B'$"):
        preset("10B")
    with pytest.raises(ValueError, match=r"^suite must be one of '2025', '2026'; got '2024'$"):
        preset("small", "2024")


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
def test_invalid_attributes(tiny, changes, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        tiny(**changes)


def test_json_round_trip(tiny, tmp_path):
    path, config = tmp_path / "config.json", tiny(window=3, rope_theta=5e5, attn=Implementation.TILED)
    config.save(path)
    assert TransformerConfig.load(path) == config
    assert json.loads(path.read_text()) == dataclasses.asdict(config)
    assert config.attn == "tiled"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values | {"depth": 3, "bias": True}, r"got unknown \['bias', 'depth'\], missing \[\]$"),
        (lambda values: {"d_model": 32}, r"got unknown \[\], missing \['vocab_size', 'context_length', 'd_ff', "),
        (lambda values: [values], "must hold a JSON object; got list$"),
        (lambda values: values | {"d_ff": -1}, "^d_ff must be at least 1; got -1$"),
    ],
)
def test_invalid_files(tiny, tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(change(dataclasses.asdict(tiny()))))
    with pytest.raises(ValueError, match=message):
        TransformerConfig.load(path)


@pytest.mark.parametrize(("window", "pairs"), [(None, 24 * 24 / 2), (24, 24 * 24 / 2), (6, 24 * 6 - 6 * 6 / 2)])
def test_training_flops(tiny, window, pairs):
    """Six per weight, and 12 d_model per visible pair and layer."""
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48) + 40 * 32
    config = tiny(window=window)
    assert config.training_flops_per_token() == 6 * weights + 12 * 32 * 2 * pairs / 24
    shorter = tiny(window=window, context_length=12)
    assert config.training_flops_per_token(12) == shorter.training_flops_per_token()
    with pytest.raises(ValueError, match=r"^length must be at least 1; got 0$"):
        config.training_flops_per_token(0)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"window": 6}, {"tie_embeddings": True}])
@pytest.mark.parametrize("length", [24, 11])
def test_flops_of_every_pair_are_torchs_count(tiny, changes, length):
    """Naive attention computes every score; the backward pass has twice the operations."""
    config = tiny(attn="naive", **changes)
    token_ids = torch.randint(config.vocab_size, (3, length + 1))
    with FlopCounterMode(display=False) as forward:
        loss = Transformer(config).loss(token_ids[:, :-1], token_ids[:, 1:])
    expected = 3 * length * config.forward_flops_per_token(length, every_pair=True)
    assert forward.get_total_flops() == pytest.approx(expected, rel=1e-12)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
