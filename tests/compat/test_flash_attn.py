"""The functions of ``flash_attn`` against their definition."""

from __future__ import annotations

import inspect
import math
import re
import typing
from typing import Any

import pytest
import torch

from cs336_systems.compat import flash_attn
from cs336_systems.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from cs336_systems.testing import Inputs, assert_within_budget, starts_of

BATCH, HEADS, KV_HEADS, D = 2, 4, 2, 8
Q_LENS, K_LENS = (3, 0, 7, 5), (4, 2, 7, 9)
SLOPES = torch.tensor([0.1, 0.5, 0.25, 1.0])
OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 0)},
    "list": {"window_size": [1, 1]},
    "causal_window": {"causal": True, "window_size": (1, 3)},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi_batch": {"alibi_slopes": torch.linspace(0.1, 1, BATCH * HEADS).view(BATCH, HEADS), "causal": True},
    "deterministic": {"deterministic": True},
    "all": {"causal": True, "window_size": (4, 0), "softcap": 2.0, "softmax_scale": 0.4, "alibi_slopes": SLOPES},
}


def make(device, dtype=torch.float64, q_len=5, k_len=7, kv_heads=KV_HEADS):
    shapes = (BATCH, q_len, HEADS, D), (BATCH, k_len, kv_heads, D), (BATCH, k_len, kv_heads, D)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def definition(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, **_):
    """The output and log-sum-exp as ``flash_attn`` documents them, for rows with a visible key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    row = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    col = torch.arange(k.shape[1], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().view(-1, q.shape[2], 1, 1) * (row - col).abs()
    left, right = (math.inf if side < 0 else side for side in window_size)
    visible = (col >= row - left) & (col <= row + (0 if causal else right))
    scores = scores.masked_fill(~visible, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


def assert_same(actual, expected, inputs):
    """Equal values and gradients of float64 tensors."""
    dout = torch.cos(torch.arange(actual.numel(), dtype=actual.dtype, device=actual.device)).view(actual.shape)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    for x, y in zip(
        *(torch.autograd.grad(out, inputs, dout, retain_graph=True) for out in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients(device, options):
    options, inputs = on(device, options), make(device)
    out, lse, probabilities = flash_attn_func(*inputs, **options, return_attn_probs=True)
    expected, expected_lse = definition(*inputs, **options)
    assert_same(out, expected, inputs)
    torch.testing.assert_close(lse, expected_lse)
    assert probabilities is None
    assert out.is_contiguous()


@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi", "deterministic", "all"])
def test_varlen_values_and_gradients(device, name):
    """Each packed sequence as `flash_attn_func` computes it alone."""
    options = on(device, OPTIONS[name])
    shapes = (sum(Q_LENS), HEADS, D), (sum(K_LENS), KV_HEADS, D), (sum(K_LENS), KV_HEADS, D)
    inputs = [torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    starts = starts_of(Q_LENS, device), starts_of(K_LENS, device)
    out, lse, probabilities = flash_attn_varlen_func(*inputs, *starts, 7, 9, return_attn_probs=True, **options)
    sequences = zip(*(x.split(lens) for x, lens in zip(inputs, (Q_LENS, K_LENS, K_LENS), strict=True)), strict=True)
    results = [flash_attn_func(*(x[None] for x in qkv), return_attn_probs=True, **options) for qkv in sequences]
    assert_same(out, torch.cat([out[0] for out, _, _ in results]), inputs)
    torch.testing.assert_close(lse, torch.cat([lse[0] for _, lse, _ in results], -1))
    assert probabilities is None
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_within_the_budget(device, dtype):
    """The budget of `attention`, which has heads before the length."""
    inputs = make(device, dtype)
    out, lse, _ = flash_attn_func(*inputs, causal=True, window_size=(3, 0), softcap=2.0, return_attn_probs=True)
    dout = torch.randn_like(out)
    tensors = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    results = dict(zip(("out", "dq", "dk", "dv"), (x.transpose(1, 2) for x in tensors), strict=True))
    q, k, v, dout = (x.detach().transpose(1, 2) for x in (*inputs, dout))
    features = {"window": (3, 0), "softcap": 2.0}
    transposed = Inputs(q, k, v, dout, torch.zeros_like(lse))
    assert_within_budget(results | {"lse": lse.detach()}, transposed, causal=True, features=features)


@pytest.mark.parametrize("probs", [False, True])
def test_packed_tensors(device, probs):
    """Options by position, so that packed functions pass them on in the right order; gradients of the whole tensor."""
    q, k, v = make(device, q_len=6, k_len=6, kv_heads=HEADS)
    options = (0.0, 0.3, True, (2, 0), 1.5, SLOPES.to(device).double(), True, probs)
    expected, lse = definition(q, k, v, *options[1:6])
    qkv, starts = torch.stack([q, k, v], 2), starts_of((6, 6), device)
    kv, packed = qkv[:, :, 1:], qkv.flatten(0, 1)
    results: tuple[Any, ...] = (
        flash_attn_qkvpacked_func(qkv, *options),
        flash_attn_kvpacked_func(q, kv, *options),
        flash_attn_varlen_func(*packed.unbind(1), starts, starts, 6, 6, *options),
        flash_attn_varlen_qkvpacked_func(packed, starts, 6, *options),
        flash_attn_varlen_kvpacked_func(packed[:, 0], packed[:, 1:], starts, starts, 6, 6, *options),
    )
    for result in results:
        out = result[0] if probs else result
        assert_same(out.view_as(q), expected, (q, k, v))
        if probs:
            actual = result[1] if out.ndim == 4 else result[1].unflatten(1, (2, 6)).transpose(0, 1)
            torch.testing.assert_close(actual, lse)
            assert result[2] is None


def test_queries_without_a_visible_key(device):
    q, k, v = make(device, torch.float32, q_len=7, k_len=5)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all()
    assert (lse[..., :2] == -torch.inf).all()
    assert lse[..., 2:].isfinite().all()


def test_dropout(device):
    q = torch.randn(1, 200, 2, 8, device=device)
    eye = torch.eye(200, device=device)[None, :, None].expand(1, -1, 2, -1)  # the output is the probabilities
    torch.manual_seed(3)
    out = flash_attn_func(q, q, eye, 0.5)
    torch.manual_seed(3)
    assert torch.equal(out, flash_attn_func(q, q, eye, 0.5, return_attn_probs=True)[0])
    assert torch.eq(out, 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_deterministic_defaults_to_torchs_setting(monkeypatch):
    seen = []
    monkeypatch.setattr(flash_attn, "attention", lambda q, k, v, **options: seen.append(options["deterministic"]) or q)
    for given in (True, False):
        flash_attn_func(*make("cpu"), deterministic=given)
    assert seen == [True, None]


LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
FIRST = {
    "flash_attn_func": "q k v",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
    "flash_attn_varlen_func": f"q k v {LENGTHS}",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS}",
}
DEFAULTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0}
DEFAULTS |= {"alibi_slopes": None, "deterministic": False, "return_attn_probs": False}


@pytest.mark.parametrize("name", FIRST)
def test_signatures(name):
    function = getattr(flash_attn, name)
    parameters = inspect.signature(function).parameters
    last = ["block_table"] if name == "flash_attn_varlen_func" else []
    assert list(parameters) == [*FIRST[name].split(), *DEFAULTS, *last]
    assert {each: parameters[each].default for each in DEFAULTS} == DEFAULTS
    assert typing.get_type_hints(function).keys() >= parameters.keys()


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
WINDOW = "window_size must be (left, right), each an integer from 0 on or -1"
DENSE = {"q": Q, "k": K, "v": K}
VARLEN = {"q": Q[0], "k": K[0], "v": K[0], "max_seqlen_q": 5, "max_seqlen_k": 7}
VARLEN |= {"cu_seqlens_q": starts_of((5,)), "cu_seqlens_k": starts_of((7,))}
THREE = torch.zeros(2, 5, 3, 4, 8)
INVALID = [
    (DENSE, {"q": None}, "q must be a torch.Tensor; got NoneType"),
    (DENSE, {"k": K[0]}, "k must have shape (batch, length, heads, d); got (7, 2, 8)"),
    (DENSE, {"v": K.double()}, "v must have dtype torch.float32 to match q; got torch.float64"),
    (DENSE, {"causal": "top_left"}, "causal must be a bool; got 'top_left' of type str"),
    (DENSE, {"deterministic": None}, "deterministic must be a bool; got None of type NoneType"),
    (DENSE, {"return_attn_probs": 2}, "return_attn_probs must be a bool; got 2 of type int"),
    (DENSE, {"window_size": 3}, f"{WINDOW}; got 3"),
    (DENSE, {"window_size": (1, 2, 3)}, f"{WINDOW}; got (1, 2, 3)"),
    (DENSE, {"window_size": (1.0, 2)}, f"{WINDOW}; got (1.0, 2)"),
    (DENSE, {"window_size": (-2, 0)}, f"{WINDOW}; got (-2, 0)"),
    (DENSE, {"softcap": -1.0}, "softcap must be above 0 and finite; got -1.0"),
    (DENSE, {"dropout_p": 2}, "dropout_p must be from 0 to 1; got 2"),
    (DENSE, {"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape (4,) or (2, 4); got (3,)"),
    (
        VARLEN,
        {"block_table": K},
        "block_table must be None: paged keys and values are not supported; got a block table",
    ),
    (VARLEN, {"causal": None}, "causal must be a bool; got None of type NoneType"),
    (VARLEN, {"q": Q}, "q must have shape (all rows, heads, d); got (2, 5, 4, 8)"),
    (VARLEN, {"max_seqlen_q": 4}, "max_seqlen_q must be at least 5, the longest sequence; got 4"),
]


PACKED = [
    (flash_attn_qkvpacked_func, (Q,), "qkv must have shape (batch, length, 3, heads, d); got (2, 5, 4, 8)"),
    (flash_attn_qkvpacked_func, ([],), "qkv must be a torch.Tensor; got list"),
    (flash_attn_kvpacked_func, (Q, THREE), "kv must have shape (batch, length, 2, heads, d); got (2, 5, 3, 4, 8)"),
    (flash_attn_varlen_qkvpacked_func, (Q[0], None, 5), "qkv must have shape (all, 3, heads, d); got (5, 4, 8)"),
    (
        *(flash_attn_varlen_kvpacked_func, (Q[0], THREE[0], None, None, 5, 5)),
        "kv must have shape (all_k, 2, heads, d); got (5, 3, 4, 8)",
    ),
]


@pytest.mark.parametrize(("valid", "change", "message"), INVALID + PACKED)
def test_invalid_arguments(valid, change, message):
    call = {id(DENSE): flash_attn_func, id(VARLEN): flash_attn_varlen_func}.get(id(valid))
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        valid(*change) if call is None else call(**valid | change)
