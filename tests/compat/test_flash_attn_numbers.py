"""Numbers as ``flash_attn`` takes them: Python's, NumPy's, and tensors of one element; windows in any pair of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from cs336_systems.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cs336_systems.testing import starts_of

WINDOWS = {
    "tensor": torch.tensor([2, 1]),
    "int32": torch.tensor([2, 1], dtype=torch.int32),
    "array": np.array([2, 1]),
    "of_tensors": (torch.tensor(2), torch.tensor([1], dtype=torch.int32)),
    "of_numpy": [np.int64(2), np.int32(1)],
}
NUMBERS = {
    "float32": np.float32,
    "float64": np.float64,
    "array": np.array,
    "tensor": torch.tensor,
    "of_one": lambda number: torch.tensor([number], dtype=torch.float64),
    "of_16_bits": lambda number: torch.tensor(number, dtype=torch.bfloat16),
}
FLAGS = {"ints": (0, 1), "numpy": (np.bool_(False), np.bool_(True)), "tensors": (torch.tensor(False), torch.tensor(1))}


@pytest.fixture
def qkv(device):
    return torch.randn(2, 9, 3, 4, 8, device=device)


def results_of(qkv, **settings):
    """What all six functions make of the same queries, keys and values."""
    q, k, v = qkv.unbind(2)
    packed, starts = qkv.flatten(0, 1), starts_of((9, 9), qkv.device)
    most = settings.pop("most", 9)
    parts = packed.unbind(1)
    made: list[Any] = [
        flash_attn_func(q, k, v, **settings),
        flash_attn_qkvpacked_func(qkv, **settings),
        flash_attn_kvpacked_func(q, qkv[:, :, 1:], **settings),
        flash_attn_varlen_func(*parts, starts, starts, most, most, **settings),
        flash_attn_varlen_qkvpacked_func(packed, starts, most, **settings),
        flash_attn_varlen_kvpacked_func(parts[0], packed[:, 1:], starts, starts, most, most, **settings),
    ]
    return torch.stack([out.reshape(2, 9, 4, 8) for out in made])


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(qkv, name):
    expected = results_of(qkv, window_size=(2, 1))
    assert not torch.equal(expected, results_of(qkv))
    assert torch.equal(results_of(qkv, window_size=WINDOWS[name]), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_sides_without_a_limit(qkv, causal):
    for sides in ((-1, -1), (2**31 - 1, 2**31 - 1), (2**62, -1)):
        assert torch.equal(
            results_of(qkv, window_size=torch.tensor(sides), causal=causal), results_of(qkv, causal=causal)
        )
    only_left = results_of(qkv, window_size=(2, -1), causal=causal)
    assert torch.equal(results_of(qkv, window_size=torch.tensor([2, -1]), causal=causal), only_left)


@pytest.mark.parametrize("name", NUMBERS)
def test_scalars(qkv, name):
    number = NUMBERS[name]
    expected = results_of(qkv, softmax_scale=0.5, softcap=2.0)
    assert torch.equal(results_of(qkv, softmax_scale=number(0.5), softcap=number(2.0)), expected)
    assert torch.equal(results_of(qkv, softcap=number(0.0), dropout_p=number(0.0)), results_of(qkv))
    assert (results_of(qkv, dropout_p=number(1.0)) == 0).all()


@pytest.mark.parametrize("most", [np.int32(9), torch.tensor(9), torch.tensor([9], dtype=torch.int32)])
def test_longest_sequences(qkv, most):
    assert torch.equal(results_of(qkv, most=most), results_of(qkv))


@pytest.mark.parametrize("name", FLAGS)
def test_flags(qkv, name):
    no, yes = FLAGS[name]
    assert torch.equal(results_of(qkv, causal=no, deterministic=yes, return_attn_probs=no), results_of(qkv))
    assert torch.equal(results_of(qkv, causal=yes), results_of(qkv, causal=True))
    out, lse, _ = flash_attn_func(*qkv.unbind(2), return_attn_probs=yes)
    assert out.shape[:-1] == lse.mT.shape


WINDOW = "window_size must be (left, right), each an integer from 0 on or -1"
REFUSED = {
    "floats": (TypeError, {"window_size": torch.tensor([1.0, 2.0])}, f"{WINDOW}; got tensor([1., 2.])"),
    "three": (TypeError, {"window_size": torch.tensor([1, 2, 3])}, f"{WINDOW}; got tensor([1, 2, 3])"),
    "one": (TypeError, {"window_size": torch.tensor(1)}, f"{WINDOW}; got tensor(1)"),
    "nested": (TypeError, {"window_size": torch.tensor([[1, 2], [3, 4]])}, f"{WINDOW}; got tensor([[1, 2],"),
    "below": (ValueError, {"window_size": torch.tensor([-2, 0])}, f"{WINDOW}; got tensor([-2,  0])"),
    "scale": (TypeError, {"softmax_scale": torch.ones(2)}, "scale must be a float or None; got tensor([1., 1.])"),
    "causal": (TypeError, {"causal": torch.tensor(2)}, "causal must be a bool; got tensor(2) of type Tensor"),
}


@pytest.mark.parametrize(("error", "wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(error, wrong, message):
    q = torch.zeros(1, 3, 2, 8)
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        flash_attn_func(q, q, q, **wrong)
