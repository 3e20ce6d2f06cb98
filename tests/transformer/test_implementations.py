"""Models that differ in what computes attention: equal logits, losses and gradients, equal training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cs336_systems.testing import compare
from cs336_systems.transformer import PRESETS, Embedding, Linear, RMSNorm, Transformer, TransformerConfig, preset

SHAPES = {
    "heads_of_16": {"d_model": 32, "num_heads": 2},
    "heads_of_32_in_a_group": {"d_model": 64, "num_heads": 2, "num_kv_heads": 1},
    "window": {"d_model": 32, "num_heads": 2, "window": 9},
    "tied": {"d_model": 32, "num_heads": 2, "tie_embeddings": True, "num_layers": 1},
}


def results_of(config, state, dtype, tokens, terms=None):
    """The logits, the loss and every gradient, in one dtype, from the same weights."""
    model = Transformer(config, device="meta", dtype=dtype).to_empty(device=tokens[0].device)
    model.load_state_dict(state)
    if terms is not None:
        note_terms(model, terms)
    logits, loss = model(tokens[0]), model.loss(*tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"out": logits.detach(), "loss": loss.detach(), **gradients}


def note_terms(model, terms):
    """Fill ``terms`` by name with the root of the sum over tokens of the squares of what makes a gradient."""

    def note(name, module, x, out):
        def of_gradient(gradient):
            dout = gradient.flatten(0, -2).square()
            if isinstance(module, Embedding):
                squares = torch.zeros_like(module.weight).index_add(0, x.flatten(), dout)
            elif isinstance(module, RMSNorm):
                squares = (dout * out.detach().flatten(0, -2).square()).sum(0)  # the weight being 1
            else:
                squares = dout.T @ x.detach().flatten(0, -2).square()
            terms[f"{name}.weight"] = squares.sqrt()

        if out.requires_grad:
            out.register_hook(of_gradient)

    for name, module in model.named_modules():
        if isinstance(module, (Linear, Embedding, RMSNorm)):
            module.register_forward_hook(lambda module, x, out, name=name: note(name, module, x[0], out))


def assert_as_naive(config, device, length, batch=2):
    """Within twice the error that naive attention leaves in a model of float32, against one of float64."""
    drawn = torch.randint(config.vocab_size, (batch, length + 1), device=device)
    tokens = drawn[:, :-1], drawn[:, 1:]
    naive = dataclasses.replace(config, attn="naive")
    state = Transformer(naive, device=device).state_dict()
    terms = {}
    exact = results_of(naive, state, torch.float64, tokens, terms)
    terms |= {"loss": exact["loss"], "out": torch.zeros_like(exact["out"])}
    in_float32 = results_of(naive, state, torch.float32, tokens)
    actual = results_of(config, state, torch.float32, tokens)
    beyond = [finding for finding in compare(actual, exact, in_float32, terms) if not finding.holds]
    assert not beyond, "\n".join(map(str, beyond))


# torch's attention has no windows.
BY_ALL = [(impl, shape) for impl in ("flash", "tiled", "sdpa") for shape in SHAPES]
COMPUTED = [pair for pair in BY_ALL if pair != ("sdpa", "window")]


@pytest.mark.parametrize(("impl", "shape"), COMPUTED)
def test_logits_loss_and_gradients(device, impl, shape):
    sizes = {"vocab_size": 50, "context_length": 40, "d_ff": 48, "num_layers": 2} | SHAPES[shape]
    assert_as_naive(TransformerConfig(**sizes, attn=impl), device, length=40)


MODELS = {f"{name}-{suite}": (name, suite) for suite, names in PRESETS.items() for name in names}
# The same sizes under another name.
DISTINCT = [name for name in MODELS if name not in ("small-2026", "medium-2026", "large-2026", "wide-2026", "xl-2026")]


@pytest.mark.parametrize("model", DISTINCT)
@pytest.mark.parametrize("impl", ["flash", "tiled"])
def test_heads_of_every_preset(device, impl, model):
    """One block of the preset's sizes; on a CPU a quarter of its heads, and a narrow feed-forward network."""
    name, suite = MODELS[model]
    changes = {"num_layers": 1, "vocab_size": 32, "context_length": 8, "attn": impl}
    config = preset(name, suite, **changes)
    if device.type == "cpu":
        heads = config.num_heads // 4
        config = dataclasses.replace(config, num_heads=heads, d_model=heads * config.d_head, d_ff=64)
    assert_as_naive(config, device, length=8, batch=1)


def losses_of(config, state, tokens, steps=20):
    model = Transformer(config, device=tokens[0].device)
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("impl", ["tiled", "sdpa", pytest.param("flash", marks=pytest.mark.gpu)])
def test_training_follows_the_same_losses(tiny, device, tokens, impl):
    config = tiny(attn=impl)
    state = Transformer(config, device=device).state_dict()
    losses = losses_of(config, state, tokens)
    assert losses[-1] < losses[0] / 3
    assert losses == pytest.approx(losses_of(dataclasses.replace(config, attn="naive"), state, tokens), rel=1e-3)
