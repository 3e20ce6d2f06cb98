"""``flash_attn``'s functions for packed sequences: each sequence as its function for a batch gives it."""

from __future__ import annotations

import inspect
import re
import typing

import pytest
import torch

from cs336_systems.compat import flash_attn
from cs336_systems.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cs336_systems.testing import starts_of

Q_LENS, K_LENS = (3, 0, 7, 5), (4, 2, 7, 9)
HEADS, D = 4, 8
LONGEST = {"max_seqlen_q": 7, "max_seqlen_k": 9}

SETTINGS = {
    "plain": {},
    "causal": {"causal": True},
    "scale_window": {"softmax_scale": 0.7, "window_size": (2, 1)},
    "causal_window_softcap": {"causal": True, "window_size": [3, -1], "softcap": 2.0},
    "slopes": {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.5, 0.25, 1.0]), "deterministic": True},
}


def made(device, kv_heads=2, k_lens=K_LENS):
    shapes = (sum(Q_LENS), HEADS, D), (sum(k_lens), kv_heads, D), (sum(k_lens), kv_heads, D)
    return [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]


def one_by_one(q, k, v, k_lens=K_LENS, **settings):
    """Output, and log-sum-exp, of each sequence by itself."""
    parts = zip(q.split(Q_LENS), k.split(k_lens), v.split(k_lens), strict=True)
    results = [flash_attn_func(*[x[None] for x in part], return_attn_probs=True, **settings) for part in parts]
    return torch.cat([out[0] for out, _, _ in results]), torch.cat([lse[0] for _, lse, _ in results], -1)


@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients(device, name):
    settings = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in SETTINGS[name].items()}
    inputs = made(device)
    starts = starts_of(Q_LENS, device), starts_of(K_LENS, device)
    out, lse, dmask = flash_attn_varlen_func(*inputs, *starts, **LONGEST, return_attn_probs=True, **settings)
    expected, expected_lse = one_by_one(*inputs, **settings)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert dmask is None
    assert out.is_contiguous()
    dout = torch.randn_like(out)
    for got, wanted in zip(*[torch.autograd.grad(x, inputs, dout) for x in (out, expected)], strict=True):
        torch.testing.assert_close(got, wanted)


def test_arguments_by_position():
    """Packed functions hand theirs on in the right order."""
    q, k, v = made("cpu", kv_heads=HEADS, k_lens=Q_LENS)
    starts, settings = starts_of(Q_LENS), (0.0, 0.3, True, (2, 0), 1.5, torch.linspace(0, 1, HEADS).double(), True)
    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
    expected, _ = one_by_one(q, k, v, k_lens=Q_LENS, **dict(zip(names, settings[1:6], strict=True)))
    for out in (
        flash_attn_varlen_func(q, k, v, starts, starts, 7, 7, *settings),
        flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), starts, 7, *settings),
        flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), starts, starts, 7, 7, *settings),
    ):
        torch.testing.assert_close(out, expected)


LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
NAMES = {
    "flash_attn_varlen_func": f"q k v {LENGTHS}",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS}",
}


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    shared = [*inspect.signature(flash_attn_func).parameters.values()][3:]
    last = ["block_table"] if name == "flash_attn_varlen_func" else []
    assert list(parameters) == [*NAMES[name].split(), *[one.name for one in shared], *last]
    assert [parameters[one.name].default for one in shared] == [one.default for one in shared]
    assert typing.get_type_hints(getattr(flash_attn, name)).keys() >= parameters.keys()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_table": torch.zeros(2, 2)}, "block_table must be None: keys and values in pages are not supported"),
        ({"causal": None}, "causal must be a bool; got None"),
        ({"window_size": (-3, 0)}, "window_size must be (left, right)"),
        ({"q": torch.zeros(1, 15, HEADS, D)}, "q must have shape (all rows, heads, d); got (1, 15, 4, 8)"),
        ({"max_seqlen_q": 6}, "max_seqlen_q must be at least 7, the longest sequence; got 6"),
    ],
)
def test_errors(wrong, message):
    q, k, v = made("cpu")
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": starts_of(Q_LENS), "cu_seqlens_k": starts_of(K_LENS), **LONGEST}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        flash_attn_varlen_func(**given | wrong)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (flash_attn_varlen_qkvpacked_func, (torch.zeros(5, 4, 8), None, 5), "qkv must have shape (all, 3, heads, d)"),
        (
            flash_attn_varlen_kvpacked_func,
            (torch.zeros(5, 4, 8), torch.zeros(5, 3, 4, 8), None, None, 5, 5),
            "kv must have shape (all_k, 2, heads, d); got (5, 3, 4, 8)",
        ),
    ],
)
def test_errors_of_packed_tensors(function, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        function(*arguments)
