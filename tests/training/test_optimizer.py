"""The learning rate against its closed form, which parameters decay, and the limit of the norm."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.training.optimizer import (
    adamw,
    clip,
    learning_rate,
    parameter_groups,
    set_learning_rate,
    update,
)
from cs336_systems.transformer import Transformer, TransformerConfig

SCHEDULE = {"highest": 2.0, "lowest": 0.5, "warmup": 10, "steps": 110}


@pytest.fixture
def model():
    return Transformer(
        TransformerConfig(vocab_size=16, context_length=8, d_model=8, d_ff=12, num_layers=2, num_heads=2)
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.2), (5, 1.0), (10, 2.0), (35, 0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2), (60, 1.25), (110, 0.5), (500, 0.5)],
)
def test_learning_rate_at(step, expected):
    assert learning_rate(step, **SCHEDULE) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_rises_and_then_falls():
    rates = [learning_rate(step, **SCHEDULE) for step in range(1, 111)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_edges_of_the_schedule():
    assert learning_rate(1, highest=1.0, lowest=0.0, warmup=0, steps=1) == pytest.approx(0.0)
    assert learning_rate(5, highest=1.0, lowest=0.0, warmup=5, steps=5) == 1.0
    assert learning_rate(3, highest=1.0, lowest=0.0, warmup=10, steps=5) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="step must be at least 1; got 0"):
        learning_rate(0, **SCHEDULE)


def test_matrices_decay_and_gains_do_not(model):
    decayed, kept = parameter_groups(model, 0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {names[id(each)].split(".")[-2] for each in kept["params"]} == {"ln1", "ln2", "ln_final"}
    assert {"token_embeddings.weight", "lm_head.weight"} <= {names[id(each)] for each in decayed["params"]}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_adamw_against_the_formula(model):
    """Three updates: the averages of the first one, corrected, are the same for any betas."""
    beta1, beta2 = 0.6, 0.9
    expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    first, second = ({name: torch.zeros_like(value) for name, value in expected.items()} for _ in range(2))
    optimizer = adamw(model, learning_rate=9.0, betas=(beta1, beta2), weight_decay=0.3)
    set_learning_rate(optimizer, 0.01)
    for step in (1, 2, 3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            gradient, decay = parameter.grad.double(), 0.3 if parameter.ndim == 2 else 0.0
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            root = (second[name] / (1 - beta2**step)).sqrt()
            move = first[name] / (1 - beta1**step) / (root + 1e-8)
            expected[name] = expected[name] * (1 - 0.01 * decay) - 0.01 * move
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_fused_kernel_is_used(model):
    assert adamw(model, learning_rate=1.0, betas=(0.9, 0.95), weight_decay=0.0).defaults["fused"]


@pytest.mark.parametrize(("limit", "scale"), [(1.0, 0.2), (10.0, 1.0), (None, 1.0)])
def test_clipping_goes_by_the_norm_of_all_gradients(limit, scale):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    norm = clip(parameters, limit)
    assert float(norm) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([3 * scale, 0])
    assert parameters[1].grad.tolist() == pytest.approx([4 * scale])
    assert parameters[2].grad is None


@pytest.mark.parametrize("limit", [None, 0.01, 1e6])
@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
def test_an_update_is_that_of_limited_gradients(device, limit, fused, dtype):
    """Whoever limits them: torch's fused kernel, or clip before it. Two updates: the second goes by both averages."""
    config = TransformerConfig(vocab_size=11, context_length=4, d_model=16, d_ff=16, num_layers=1, num_heads=2)
    models = [Transformer(config, device=device, dtype=dtype) for _ in range(2)]
    rounding = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    models[1].load_state_dict(models[0].state_dict())
    mine, plain = (torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.01, fused=fused or None) for model in models)
    for _ in range(2):
        for parameter, other in zip(*(model.parameters() for model in models), strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        expected = clip(models[1].parameters(), limit)
        plain.step()
        norm = update(mine, models[0], limit)
        torch.testing.assert_close(norm, expected)
        assert all(parameter.grad is None for parameter in models[0].parameters())
        for parameter, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter, other, **rounding)
    assert not hasattr(mine, "grad_scale")


def test_the_fused_kernel_limits_gradients_itself(model, monkeypatch):
    """Else they would be read and written once more."""
    optimizer = adamw(model, learning_rate=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    seen = []
    monkeypatch.setattr(optimizer, "step", lambda: seen.append(optimizer.grad_scale))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = update(optimizer, model, 0.5)
    assert float(seen[0]) == pytest.approx(2 * float(norm), rel=1e-4)
