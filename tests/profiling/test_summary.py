"""One call that says where a training step's time and memory go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cs336_systems.profiling import profile

pytest.importorskip("pandas")


class Gate(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class WithLoss(nn.Module):
    """Called by keywords; its output has a loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x, y):
        return SimpleNamespace(loss=(self.linear(x) - y).abs().mean())


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), Gate(), nn.Linear(64, 3))


def test_time_memory_and_saved_tensors_of_a_step(tmp_path):
    model, x = make(), torch.randn(4, 8)
    before = [p.clone() for p in model.parameters()]
    found = profile(model, x, steps=2, top=2)
    assert [*found.phases] == ["forward", "backward", "optimizer", "step"]
    assert found.phases["step"] > 0
    assert any("mm" in name for name in found.kernels)
    assert [*found.kernels.values()] == sorted(found.kernels.values(), reverse=True)
    assert {"Gate", "Linear"} <= found.modules.keys()
    assert found.peak["parameters"] == sum(p.numel() for p in before) * 4
    # x and its sigmoid
    assert sum(each.module == "1" for each in found.saved) == 2
    assert all(torch.equal(p, same) for p, same in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    found.save(tmp_path / "profile.md")
    page = (tmp_path / "profile.md").read_text()
    assert page == f"# Profile of Sequential\n\n{found}\n"
    assert page.count("\n| 1 ") == 2
    assert "test_summary.py" in page


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_keywords_and_a_loss_of_the_output(optimizer):
    model = WithLoss()
    before = model.linear.weight.clone()
    made = optimizer and optimizer(model.parameters(), lr=0.1)
    found = profile(model, {"x": torch.randn(4, 8), "y": torch.zeros(4, 8)}, optimizer=made, steps=1)
    assert found.model == "WithLoss"
    assert torch.equal(before, model.linear.weight) == (optimizer is None)


def test_another_loss():
    calls = []

    def loss(output):
        calls.append(output.shape)
        return output.sum()

    profile(make(), (torch.randn(4, 8),), loss=loss, steps=1)
    assert set(calls) == {(4, 3)}


@pytest.mark.parametrize(
    ("model", "how", "error", "message"),
    [
        (Gate(), {}, ValueError, "model must have a parameter that needs a gradient; got none"),
        (make(), {"steps": 0}, ValueError, "steps must be at least 1; got 0"),
        (nn.LSTM(8, 8), {}, TypeError, "loss must be given for an output without a loss that is no tensor; got tuple"),
    ],
)
def test_what_cannot_be_profiled(model, how, error, message):
    with pytest.raises(error, match=message):
        profile(model, torch.randn(4, 8), **how)
