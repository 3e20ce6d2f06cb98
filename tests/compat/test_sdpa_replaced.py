"""`replaced` redirects ``torch.nn.functional.scaled_dot_product_attention`` to this library, and restores it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cs336_systems.attention import attention
from cs336_systems.compat import sdpa
from cs336_systems.compat.sdpa import replaced

TORCHS = F.scaled_dot_product_attention


@pytest.fixture
def impls(monkeypatch):
    """The ``impl`` of each call of `attention` from the module."""
    calls = []

    def record(*args, impl, **options):
        calls.append(impl)
        return attention(*args, impl=impl, **options)

    monkeypatch.setattr(sdpa, "attention", record)
    yield calls
    assert F.scaled_dot_product_attention is TORCHS


X = torch.randn(1, 1, 2, 4)


def call():
    return F.scaled_dot_product_attention(X, X, X)


def test_replaced_nests_and_restores(impls):
    with replaced("naive"):
        with replaced("tiled"):
            call()
        out = torch.nn.functional.scaled_dot_product_attention(X, X, X)
    torch.testing.assert_close(out, call())
    assert impls == ["tiled", "naive"]
    with pytest.raises(ValueError, match=r"^impl must be one of .*; got 'fast'$"), replaced("fast"):
        pytest.fail("no error")
    with pytest.raises(TypeError, match=r"^query must be a torch\.Tensor"), replaced():
        F.scaled_dot_product_attention([1.0], [1.0], [1.0])


def test_replaced_as_a_decorator_and_in_every_thread(impls):
    @replaced("tiled")
    def decorated():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    for _ in range(2):
        decorated()
        assert F.scaled_dot_product_attention is TORCHS
    assert impls == ["tiled", "tiled"]


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_attention_calls_torchs_function_inside_of_replaced(device, causal):
    q, k, v = (torch.randn(shape, device=device) for shape in [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)])
    with replaced("sdpa"):
        out = attention(q, k, v, causal=causal, impl="sdpa")
        again = F.scaled_dot_product_attention(q, k, v, is_causal=causal == "top_left")
    torch.testing.assert_close(out, attention(q, k, v, causal=causal, impl="naive"))
    if causal != "bottom_right":
        torch.testing.assert_close(again, out)


def train(module, *inputs, **options):
    """A module's output in training mode, and its gradients."""
    out = module(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_replaced_in_torchs_modules(device, impls, kind, masks):
    x = torch.randn(2, 6, 16, device=device, dtype=torch.float64)
    padding, mask = ("key_padding_mask", "attn_mask") if kind == "attention" else ("src_key_padding_mask", "src_mask")
    options: dict[str, object] = {}
    if masks in ("padding", "both"):
        options[padding] = torch.arange(6, device=device) >= torch.tensor([[6], [4]], device=device)
    if masks in ("causal", "both"):
        options[mask] = torch.ones(6, 6, device=device, dtype=torch.bool).triu(1)
    settings = {"batch_first": True, "dropout": 0.0, "device": device, "dtype": torch.float64}
    if kind == "attention":
        module: nn.Module = nn.MultiheadAttention(16, 4, **settings)
        inputs = [x, x, x]
        options["need_weights"] = False
    else:
        module = nn.TransformerEncoderLayer(16, 4, 32, **settings)
        inputs = [x]
    expected = train(module, *inputs, **options)
    with replaced():
        actual = train(module, *inputs, **options)
    assert impls == ["auto"]
    for ours, torchs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, torchs)
