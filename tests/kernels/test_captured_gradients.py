"""Gradients of what score rules captured, after a backward that other kernels compute."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import variants
from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.attention.mods import score_mod
from cs336_systems.kernels.triton.captured_gradients import AfterBackward
from cs336_systems.testing import Shapes, assert_within_budget, make_inputs, oracle

Q_LEN, K_LEN = 140, 270


def numbers(device, *shape):
    return torch.randn(shape, device=device, requires_grad=True)


def temperatures(on):
    """A factor for each head, and products of numbers for rows of q and for keys."""
    heat, of_rows, of_keys = numbers(on, 4), numbers(on, 2, Q_LEN), numbers(on, 4, K_LEN)
    return score_mod(lambda s, b, h, q, k: s * heat[h] + of_rows[b, q] * of_keys[h, k])


CASES = {
    "pairs": lambda on: {"bias": numbers(on, 4, Q_LEN, K_LEN)},
    "distances": lambda on: {"scores": variants.relative_bias(numbers(on, 1, 4, Q_LEN + K_LEN - 1), Q_LEN - 1)},
    "heads": lambda on: {"alibi_slopes": numbers(on, 4)},
    "entries_and_heads": lambda on: {"alibi_slopes": numbers(on, 2, 4), "softcap": 3.0},
    "rows": lambda on: {"bias": numbers(on, 2, 1, Q_LEN, 1), "window": (20, None)},
    "columns": lambda on: {"bias": numbers(on, 2, 4, 1, K_LEN)},
    "all": lambda on: {"bias": numbers(on, 4, Q_LEN, K_LEN), "scores": temperatures(on)},
    "listed": lambda on: {
        "scores": temperatures(on),
        "mask": variants.block_local(128).with_blocks(Q_LEN, K_LEN, causal=True, device=on),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_they_follow_from_the_log_sum_exp_and_delta(flash_device, name):
    shapes = Shapes.of(2, q_len=Q_LEN, k_len=K_LEN, d=16, q_heads=4, kv_heads=2)
    inputs, features = make_inputs(shapes, dtype=torch.float16, device=flash_device), CASES[name](flash_device)
    call = make_call(*inputs[:3], Arguments.of(causal=True, **features))
    exact = oracle(inputs, causal=True, features=features)
    expected = [x for x in exact if x.startswith("d") and x not in ("dq", "dk", "dv")]
    lse, out = exact["lse"].float(), exact["out"].to(inputs.q.dtype)
    delta = ((exact["out"] * inputs.dout).sum(-1) - inputs.dlse).float()
    q, k, v, dout, dlse = inputs
    found = AfterBackward(call, call.wanted)(q, k, v, out, lse, dout, dlse, delta, call.aux)
    named = {
        name: gradient.detach().view_as(exact[name])
        for name, gradient in zip(expected, [x for x in found if x is not None], strict=True)
    }
    # With the log-sum-exp, whose gradient is a part of delta.
    assert_within_budget({"lse": lse} | named, inputs, causal=True, features=features)
