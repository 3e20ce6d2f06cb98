"""Sums of a thousand terms, and the dtypes that autocast gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_systems.profiling.precision import ACCUMULATIONS, Accumulation, TensorDtype, tensor_dtypes

TOTALS = {
    "float32": 10.000133514404297,
    "float16": 9.953125,
    "mixed float16": 10.00213623046875,
    "mixed float16, cast": 10.00213623046875,
    "bfloat16": 4.0,
    "mixed bfloat16": 10.009765625,
}


def cross_entropy(logits):
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


class ToyModel(nn.Module):
    """The model of Stanford CS336's systems assignment."""

    def __init__(self):
        super().__init__()
        self.fc1, self.relu = nn.Linear(16, 10, bias=False), nn.ReLU()
        self.ln, self.fc2 = nn.LayerNorm(10), nn.Linear(10, 8, bias=False)

    def forward(self, x):
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def by_tensor(seen):
    return {(one.role, one.name): one.dtype for one in seen}


def test_the_sums_are_exactly_these():
    assert {way.name: way.total() for way in ACCUMULATIONS} == TOTALS
    assert Accumulation("halves", torch.float16, torch.float16).total(0.5, 6) == 3.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtypes_of_the_toy_model_under_autocast(dtype):
    seen = tensor_dtypes(ToyModel(), torch.randn(4, 16), loss=cross_entropy, autocast=dtype)
    weights = ("fc1.weight", "ln.weight", "ln.bias", "fc2.weight")
    layers = ("fc1", "relu", "ln", "fc2")
    assert by_tensor(seen) == (
        {("parameter", name): torch.float32 for name in weights}
        | {("output", name): dtype for name in layers}
        | {("result", ""): dtype, ("loss", ""): torch.float32}
        | {("gradient of output", name): dtype for name in layers}
        | {("gradient", name): torch.float32 for name in weights}
    )
    assert [one.name for one in seen if one.role == "output"] == [*layers]
    assert [one.name for one in seen if one.role == "gradient of output"] == [*reversed(layers)]
    assert TensorDtype("output", "ln", "LayerNorm", dtype) in seen
    assert TensorDtype("parameter", "ln.bias", "LayerNorm", torch.float32) in seen


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_autocast_keeps_layer_norm_in_float32(dtype):
    seen = by_tensor(tensor_dtypes(ToyModel().cuda(), torch.randn(4, 16).cuda(), loss=cross_entropy, autocast=dtype))
    outputs = [seen["output", name] for name in ("fc1", "relu", "ln", "fc2")]
    assert outputs == [dtype, dtype, torch.float32, dtype]
    assert (seen["result", ""], seen["loss", ""]) == (dtype, torch.float32)


class Nested(nn.Module):
    """Returns tensors in containers, calls a module twice, and has a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        self.fixed = nn.Linear(4, 4).requires_grad_(False).to(torch.float64)
        self.unused = nn.Linear(4, 4)

    def forward(self, x, scale):
        once = self.inner(x) * scale
        return {"twice": [self.inner(once)], "wide": self.fixed(x.double()), "indices": torch.arange(3)}


def test_any_model_and_it_is_left_as_it_was():
    model = Nested()
    arguments = (torch.randn(2, 4), 2.0)
    seen = tensor_dtypes(model, arguments, loss=lambda result: result["twice"][0].sum())
    found = by_tensor(seen)
    assert found["parameter", "fixed.weight"] == found["output", "fixed"] == torch.float64
    assert not {("gradient", "fixed.weight"), ("gradient", "unused.weight")} & found.keys()
    assert ("gradient of output", "fixed") not in found
    assert {one.dtype for one in seen if one.role == "result"} == {torch.float32, torch.float64}
    assert len([one for one in seen if (one.role, one.name) == ("output", "inner.0")]) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_without_a_loss_there_is_no_backward_pass_and_a_failure_leaves_no_hooks():
    model = ToyModel()
    assert {one.role for one in tensor_dtypes(model, torch.randn(4, 16))} == {"parameter", "output", "result"}
    with pytest.raises(RuntimeError):
        tensor_dtypes(model, torch.randn(4, 17))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("loss", [lambda logits: logits, lambda logits: logits.detach().sum()])
def test_a_loss_that_has_no_gradients_is_refused(loss):
    with pytest.raises(ValueError, match="loss must return a scalar that requires gradients"):
        tensor_dtypes(ToyModel(), torch.randn(4, 16), loss=loss)
