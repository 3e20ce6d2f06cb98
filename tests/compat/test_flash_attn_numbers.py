"""Numbers of all types that ``flash_attn`` accepts: Python's, NumPy's, and tensors of one element; windows likewise."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from cs336_systems.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

WINDOWS = [
    *(torch.tensor([2, 1]), torch.tensor([2, 1], dtype=torch.int32), np.array([2, 1])),
    *((torch.tensor(2), torch.tensor([1], dtype=torch.int32)), [np.int64(2), np.int32(1)]),
]
NUMBERS = [
    *(np.float32, np.float64, np.array, torch.tensor),
    lambda number: torch.tensor([number], dtype=torch.float64),
    lambda number: torch.tensor(number, dtype=torch.bfloat16),
]
FLAGS = [(0, 1), (np.bool_(False), np.bool_(True)), (torch.tensor(False), torch.tensor(1))]


@pytest.fixture
def call(device):
    """Calls `flash_attn_func` with options."""
    q, k, v = torch.randn(3, 2, 9, 4, 8, device=device)
    return lambda **options: flash_attn_func(q, k, v, **options)


def test_windows(call):
    expected = call(window_size=(2, 1))
    assert not torch.equal(expected, call())
    for window in WINDOWS:
        assert torch.equal(call(window_size=window), expected), window


@pytest.mark.parametrize("causal", [False, True])
def test_unlimited_sides(call, causal):
    for sides in ((-1, -1), (2**31 - 1, 2**31 - 1), (2**62, -1)):
        assert torch.equal(call(window_size=torch.tensor(sides), causal=causal), call(causal=causal))
    left = call(window_size=(2, -1), causal=causal)
    assert torch.equal(call(window_size=torch.tensor([2, -1]), causal=causal), left)


@pytest.mark.parametrize("number", NUMBERS)
def test_scalars(call, number):
    expected = call(softmax_scale=0.5, softcap=2.0)
    assert torch.equal(call(softmax_scale=number(0.5), softcap=number(2.0)), expected)
    assert torch.equal(call(softcap=number(0.0), dropout_p=number(0.0)), call())
    assert (call(dropout_p=number(1.0)) == 0).all()


def test_maximum_lengths(device):
    q, starts = torch.randn(18, 4, 8, device=device), torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    expected = flash_attn_varlen_func(q, q, q, starts, starts, 9, 9)
    for longest in (np.int32(9), torch.tensor(9), torch.tensor([9], dtype=torch.int32)):
        assert torch.equal(flash_attn_varlen_func(q, q, q, starts, starts, longest, longest), expected)


@pytest.mark.parametrize(("no", "yes"), FLAGS)
def test_flags(call, no, yes):
    assert torch.equal(call(causal=no, deterministic=yes, return_attn_probs=no), call())
    assert torch.equal(call(causal=yes), call(causal=True))
    out, lse, _ = call(return_attn_probs=yes)
    assert out.shape[:-1] == lse.mT.shape


WINDOW = "window_size must be (left, right), each an integer from 0 on or -1"
INVALID = [
    (TypeError, {"window_size": torch.tensor([1.0, 2.0])}, f"{WINDOW}; got tensor([1., 2.])"),
    (TypeError, {"window_size": torch.tensor([1, 2, 3])}, f"{WINDOW}; got tensor([1, 2, 3])"),
    (TypeError, {"window_size": torch.tensor(1)}, f"{WINDOW}; got tensor(1)"),
    (TypeError, {"window_size": torch.tensor([[1, 2], [3, 4]])}, f"{WINDOW}; got tensor([[1, 2],"),
    (ValueError, {"window_size": torch.tensor([-2, 0])}, f"{WINDOW}; got tensor([-2,  0])"),
    (TypeError, {"softmax_scale": torch.ones(2)}, "scale must be a float or None; got tensor([1., 1.])"),
    (TypeError, {"causal": torch.tensor(2)}, "causal must be a bool; got tensor(2) of type Tensor"),
]


@pytest.mark.parametrize(("error", "options", "message"), INVALID)
def test_invalid_numbers(error, options, message):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        flash_attn_func(q, q, q, **options)
