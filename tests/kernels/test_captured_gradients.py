"""Gradients of pairs and distances after a backward that other kernels compute."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.variants import relative_bias
from cs336_systems.kernels.triton.captured_gradients import AfterBackward
from cs336_systems.testing import Shapes, assert_within_budget, make_inputs, oracle


@pytest.mark.parametrize("name", ["bias", "scores"])
def test_they_follow_from_the_log_sum_exp_and_delta(flash_device, name):
    shapes = Shapes.of(2, q_len=45, k_len=70, d=16, q_heads=4, kv_heads=2)
    inputs = make_inputs(shapes, dtype=torch.float16, device=flash_device)
    bias, table = (torch.randn(shape, device=flash_device, requires_grad=True) for shape in ((4, 45, 70), (1, 4, 114)))
    captured = bias if name == "bias" else table
    features = {name: bias if name == "bias" else relative_bias(table, 44)}
    call = make_call(*inputs[:3], Arguments.of(causal=True, **features))
    exact = oracle(inputs, causal=True, features=features)
    lse = exact["lse"].float()
    delta = ((exact["out"] * inputs.dout).sum(-1) - inputs.dlse).float()
    q, k, v, dout, _ = inputs
    [found] = AfterBackward(call, call.wanted)(q, k, v, dout, lse, delta, call.aux)
    expected = "dbias" if name == "bias" else "dscores_0"
    assert found is not None
    # With the log-sum-exp, whose gradient is a part of delta.
    assert_within_budget(
        {"lse": lse, expected: found.detach().view_as(captured)}, inputs, causal=True, features=features
    )
