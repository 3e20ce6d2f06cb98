"""Models with different implementations of attention: equal logits, losses and gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cs336_systems.transformer import PRESETS, Transformer, TransformerConfig, preset

from .conftest import gradients

SHAPES = {
    "heads_of_16": {"d_model": 32, "num_heads": 2},
    "grouped_heads_of_32": {"d_model": 64, "num_heads": 2, "num_kv_heads": 1},
    "window": {"d_model": 32, "num_heads": 2, "window": 9},
    "tied": {"d_model": 32, "num_heads": 2, "tie_embeddings": True, "num_layers": 1},
}


def evaluate(config, state, dtype, tokens):
    """The logits, the loss and every gradient in one dtype, with the same weights."""
    model = Transformer(config, device="meta", dtype=dtype).to_empty(device=tokens[0].device)
    model.load_state_dict(state)
    logits, loss = model(tokens[0]), model.loss(*tokens)
    return {"out": logits.detach(), "loss": loss.detach(), **gradients(model, loss)}


def assert_close_to_naive(config, device, length, batch=2):
    """The errors against float64 are at most twice those of naive attention in float32, plus float32's rounding."""
    drawn = torch.randint(config.vocab_size, (batch, length + 1), device=device)
    tokens = drawn[:, :-1], drawn[:, 1:]
    naive = dataclasses.replace(config, attn="naive")
    state = Transformer(naive, device=device).state_dict()
    exact = evaluate(naive, state, torch.float64, tokens)
    expected, actual = (evaluate(each, state, torch.float32, tokens) for each in (naive, config))
    for name, x in actual.items():
        error, naive_error = ((each - exact[name]).abs().amax() for each in (x, expected[name]))
        assert error <= 2 * naive_error + 32 * torch.finfo(torch.float32).eps * exact[name].abs().amax(), name


# torch's attention has no windows.
CASES = [
    (impl, shape) for impl in ("flash", "tiled", "sdpa") for shape in SHAPES if (impl, shape) != ("sdpa", "window")
]


@pytest.mark.parametrize(("impl", "shape"), CASES)
def test_logits_loss_and_gradients(device, impl, shape):
    sizes = {"vocab_size": 50, "context_length": 40, "d_ff": 48, "num_layers": 2} | SHAPES[shape]
    assert_close_to_naive(TransformerConfig(**sizes, attn=impl), device, length=40)


# One preset for each width of a head.
WIDTHS = {64: ("small", "2025"), 80: ("2.7B", "2025"), 128: ("10B", "2026"), 800: ("wide", "2025")}
PRESET_CASES = [
    pytest.param(impl, width, marks=pytest.mark.slow if impl == "flash" and width > 80 else ())
    for impl in ("flash", "tiled")
    for width in WIDTHS
]


def test_widths_of_heads():
    assert {sizes.d_model // sizes.num_heads for suite in PRESETS.values() for sizes in suite.values()} == {*WIDTHS}


@pytest.mark.parametrize(("impl", "width"), PRESET_CASES)
def test_heads_of_presets(device, impl, width):
    """One block with the preset's heads; on a CPU a quarter of them, and a narrow feed-forward network."""
    name, suite = WIDTHS[width]
    config = preset(name, suite, num_layers=1, vocab_size=32, context_length=8, attn=impl)
    if device.type == "cpu":
        heads = config.num_heads // 4
        config = dataclasses.replace(config, num_heads=heads, d_model=heads * config.d_head, d_ff=64)
    assert_close_to_naive(config, device, length=8, batch=1)
