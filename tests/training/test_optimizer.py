"""The learning rate against its formula, AdamW and its weight decay, and clipping."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.training.optimizer import adamw, learning_rate, update
from cs336_systems.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=16, context_length=8, d_model=16, d_ff=12, num_layers=2, num_heads=2)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.2), (5, 1.0), (10, 2.0), (35, 0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2), (60, 1.25), (110, 0.5)],
)
def test_learning_rate(step, expected):
    assert learning_rate(step, 2.0, 0.5, warmup=10, steps=110) == pytest.approx(expected, rel=1e-12)


def test_edges_of_the_schedule():
    rates = [learning_rate(1, 1.0, 0.0, 0, 1), learning_rate(5, 1.0, 0.0, 5, 5), learning_rate(3, 1.0, 0.0, 10, 5)]
    assert rates == pytest.approx([0.0, 1.0, 0.3])


def test_matrices_decay_and_gains_do_not():
    model = Transformer(CONFIG)
    optimizer = adamw(model, 0.01, (0.6, 0.9), weight_decay=0.3)
    assert optimizer.defaults["fused"]
    groups = [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in optimizer.param_groups]
    assert groups == [(0.3, {2}), (0.0, {1})]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("max_norm", [None, 0.01, 1e6])
@pytest.mark.parametrize(("fused", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
def test_update_clips_to_the_norm_of_all_gradients(device, max_norm, fused, dtype):
    """Against clipping by hand. Two updates: the second depends on both moments."""
    models = [Transformer(CONFIG, device=device, dtype=dtype) for _ in range(2)]
    rounding = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    models[1].load_state_dict(models[0].state_dict())
    mine, plain = (torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused) for model in models)
    for _ in range(2):
        gradients = [torch.randn_like(parameter) for parameter in models[0].parameters()]
        norm = torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()
        scale = 1.0 if max_norm is None else min(1.0, max_norm / float(norm))
        for parameter, other, gradient in zip(*(model.parameters() for model in models), gradients, strict=True):
            parameter.grad, other.grad = gradient.clone(), gradient * scale
        plain.step()
        torch.testing.assert_close(update(mine, models[0], max_norm).float(), norm, rtol=1e-2, atol=0)
        assert all(parameter.grad is None for parameter in models[0].parameters())
        for parameter, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(parameter, other, **rounding)
    assert not hasattr(mine, "grad_scale")


def test_the_fused_kernel_clips(monkeypatch):
    """Without another pass over the gradients, which do not change."""
    model, gain = Transformer(CONFIG), torch.full((CONFIG.d_model,), 3.0)
    optimizer = adamw(model, 0.01, (0.9, 0.95), weight_decay=0.0)
    scales = []
    monkeypatch.setattr(optimizer, "step", lambda: scales.append(float(optimizer.grad_scale)))
    monkeypatch.setattr(optimizer, "zero_grad", lambda: None)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    norm = update(optimizer, model, 0.5)
    assert scales == [pytest.approx(2 * float(norm), rel=1e-4)]
    assert torch.equal(model.ln_final.weight.grad, gain)
