"""The functions of ``flash_attn`` against their definition, and the package that stands in for the real one."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.compat import flash_attn
from cs336_systems.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    install,
)
from cs336_systems.testing import Inputs, assert_within_budget

BATCH, HEADS, KV_HEADS, D = 2, 4, 2, 8


def made(device, dtype, q_len=5, k_len=7, kv_heads=KV_HEADS):
    shapes = (BATCH, q_len, HEADS, D), (BATCH, k_len, kv_heads, D), (BATCH, k_len, kv_heads, D)
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]


def defined(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """The output and log-sum-exp as ``flash_attn`` documents them, for rows that see a key."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    of = torch.arange(k.shape[1], device=q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().view(-1, q.shape[2], 1, 1) * (at - of).abs()
    left, right = window_size
    hidden = torch.zeros_like(at - of, dtype=torch.bool)
    if causal:
        hidden = hidden | (of > at)
    if left >= 0:
        hidden = hidden | (of < at - left)
    if right >= 0:
        hidden = hidden | (of > at + right)
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), scores.logsumexp(-1)


SETTINGS = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 0)},
    "list": {"window_size": [1, 1]},
    "causal_window": {"causal": True, "window_size": (1, 3)},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.5, 0.25, 1.0])},
    "alibi_batch": {"alibi_slopes": torch.linspace(0.1, 1, BATCH * HEADS).view(BATCH, HEADS), "causal": True},
    "deterministic": {"deterministic": True},
    "all": {"causal": True, "window_size": (4, 0), "softcap": 2.0, "softmax_scale": 0.4},
}


def on(device, settings):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in settings.items()}


def gradients(out, inputs):
    dout = torch.cos(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).view(out.shape)
    return torch.autograd.grad(out, inputs, dout)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_values_and_gradients(device, settings):
    settings, dtype = on(device, settings), torch.float64
    inputs = made(device, dtype)
    out, lse, weights = flash_attn_func(*inputs, **settings, return_attn_probs=True)
    settings.pop("deterministic", None)
    exact, exact_lse = defined(*inputs, **settings)
    error = {"rtol": 1e-11, "atol": 1e-11}
    assert weights is None
    assert (out.dtype, lse.dtype) == (dtype, dtype)
    assert out.is_contiguous()
    assert lse.shape == (BATCH, HEADS, 5)
    torch.testing.assert_close(out, exact, **error)
    torch.testing.assert_close(lse, exact_lse, **error)
    for actual, expected in zip(gradients(out, inputs), gradients(exact, inputs), strict=True):
        torch.testing.assert_close(actual, expected, **error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes_are_within_the_budget(device, dtype):
    """Of `attention`, which has the heads before the length."""
    inputs = made(device, dtype)
    out, lse, _ = flash_attn_func(*inputs, causal=True, window_size=(3, 0), softcap=2.0, return_attn_probs=True)
    dout = torch.randn_like(out)
    found = (out.detach(), *torch.autograd.grad(out, inputs, dout))
    results = dict(zip(("out", "dq", "dk", "dv"), (x.transpose(1, 2) for x in found), strict=True))
    q, k, v, dout = (x.detach().transpose(1, 2) for x in (*inputs, dout))
    features = {"window": (3, 0), "softcap": 2.0}
    same = Inputs(q, k, v, dout, torch.zeros_like(lse))
    assert_within_budget(results | {"lse": lse.detach()}, same, causal=True, features=features)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_packed(device, name):
    """The same numbers, and gradients of the whole tensor."""
    settings = SETTINGS[name]
    q, k, v = made(device, torch.float64, q_len=6, k_len=6, kv_heads=HEADS)
    expected = flash_attn_func(q, k, v, **settings)
    dq, dk, dv = gradients(expected, (q, k, v))
    qkv, kv = torch.stack([q, k, v], 2), torch.stack([k, v], 2)
    for out, packed, dpacked in (
        (flash_attn_qkvpacked_func(qkv, **settings), qkv, torch.stack([dq, dk, dv], 2)),
        (flash_attn_kvpacked_func(q, kv, **settings), kv, torch.stack([dk, dv], 2)),
    ):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradients(out, [packed])[0], dpacked)


def test_packed_returns_the_log_sum_exp(device):
    q, k, v = made(device, torch.float64, q_len=6, k_len=6, kv_heads=HEADS)
    _, expected, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    for returned in (
        flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), return_attn_probs=True),
        flash_attn_kvpacked_func(q, torch.stack([k, v], 2), return_attn_probs=True),
    ):
        torch.testing.assert_close(returned[1], expected)
        assert returned[2] is None


def test_queries_that_see_no_key(device):
    q, k, v = made(device, torch.float32, q_len=7, k_len=5)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :2] == 0).all()
    assert (lse[..., :2] == -torch.inf).all()
    assert lse[..., 2:].isfinite().all()


def test_dropout(device):
    q = torch.randn(1, 200, 2, 8, device=device)
    eye = torch.eye(200, device=device)[None, :, None].expand(1, -1, 2, -1)  # the output is the weights
    torch.manual_seed(3)
    out = flash_attn_func(q, q, eye, 0.5)
    torch.manual_seed(3)
    again, _, weights = flash_attn_func(q, q, eye, 0.5, return_attn_probs=True)
    dropped = torch.eq(out, 0)
    assert dropped.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert torch.equal(out, again)
    assert weights is None


@pytest.mark.parametrize(("asked", "expected"), [(True, True), (False, None)])
def test_deterministic_is_asked_for_or_left_to_torch(monkeypatch, asked, expected):
    given = []

    def record(*inputs, deterministic, **options):
        given.append(deterministic)
        return attention(*inputs, deterministic=deterministic, **options)

    monkeypatch.setattr(flash_attn, "attention", record)
    q, k, v = made("cpu", torch.float32)
    flash_attn_func(q, k, v, deterministic=asked)
    assert given == [expected]


NAMES = {
    "flash_attn_func": "q k v",
    "flash_attn_qkvpacked_func": "qkv",
    "flash_attn_kvpacked_func": "q kv",
}
DEFAULTS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*NAMES[name].split(), *DEFAULTS]
    assert {each: parameters[each].default for each in DEFAULTS} == DEFAULTS


def test_arguments_by_position():
    """Packed functions hand theirs on in the right order."""
    q, k, v = made("cpu", torch.float64, q_len=6, k_len=6, kv_heads=HEADS)
    settings = (0.0, 0.3, True, (2, 0), 1.5, torch.linspace(0, 1, HEADS), True, False)
    expected, _ = defined(q, k, v, *settings[1:6])
    for out in (
        flash_attn_func(q, k, v, *settings),
        flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *settings),
        flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *settings),
    ):
        torch.testing.assert_close(out, expected)


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
WINDOW = "window_size must be (left, right), each an integer from 0 on or -1"
WRONG = {
    "q": (TypeError, {"q": None}, "q must be a torch.Tensor; got NoneType"),
    "k": (ValueError, {"k": K[0]}, "k must have shape (batch, length, heads, d); got (7, 2, 8)"),
    "v": (TypeError, {"v": K.double()}, "v must have dtype torch.float32 to match q; got torch.float64"),
    "causal": (TypeError, {"causal": "top_left"}, "causal must be a bool; got 'top_left' of type str"),
    "deterministic": (TypeError, {"deterministic": None}, "deterministic must be a bool; got None of type NoneType"),
    "return": (TypeError, {"return_attn_probs": 2}, "return_attn_probs must be a bool; got 2 of type int"),
    "window": (TypeError, {"window_size": 3}, f"{WINDOW}; got 3"),
    "window_of_three": (TypeError, {"window_size": (1, 2, 3)}, f"{WINDOW}; got (1, 2, 3)"),
    "window_of_floats": (TypeError, {"window_size": (1.0, 2)}, f"{WINDOW}; got (1.0, 2)"),
    "window_below": (ValueError, {"window_size": (-2, 0)}, f"{WINDOW}; got (-2, 0)"),
    "softcap": (ValueError, {"softcap": -1.0}, "softcap must be above 0 and finite; got -1.0"),
    "dropout_p": (ValueError, {"dropout_p": 2}, "dropout_p must be from 0 to 1; got 2"),
    "slopes": (
        ValueError,
        {"alibi_slopes": torch.ones(3)},
        "alibi_slopes must have shape (4,) or (2, 4); got (3,)",
    ),
}


@pytest.mark.parametrize(("error", "wrong", "message"), WRONG.values(), ids=WRONG)
def test_errors(error, wrong, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        flash_attn_func(**{"q": Q, "k": K, "v": K} | wrong)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (flash_attn_qkvpacked_func, (Q,), "qkv must have shape (batch, length, 3, heads, d); got (2, 5, 4, 8)"),
        (flash_attn_qkvpacked_func, ([],), "qkv must be a torch.Tensor; got list"),
        (
            flash_attn_kvpacked_func,
            (Q, torch.zeros(2, 5, 3, 4, 8)),
            "kv must have shape (batch, length, 2, heads, d); got (2, 5, 3, 4, 8)",
        ),
    ],
)
def test_errors_of_packed_tensors(function, arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        function(*arguments)


@pytest.fixture
def unimported(monkeypatch):
    """No module ``flash_attn``, and afterwards what there was."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("unimported")
def test_installed_for_a_while():
    with install():
        import flash_attn as package
        import flash_attn.flash_attn_interface as interface
        from flash_attn import flash_attn_interface
        from flash_attn.flash_attn_interface import flash_attn_kvpacked_func as kvpacked

        assert package.__name__ == "flash_attn"
        assert package.flash_attn_func is interface.flash_attn_func is flash_attn_func
        assert flash_attn_interface is interface
        assert kvpacked is flash_attn_kvpacked_func
        assert package.__version__ == flash_attn.__version__ == "2.8.3"
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.bert_padding") is None
    assert not [name for name in sys.modules if name.startswith("flash_attn")]


@pytest.mark.usefixtures("unimported")
def test_installed_until_closed():
    undo = install()
    with install():  # in itself
        pass
    assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func
    undo.close()
    assert "flash_attn" not in sys.modules


@pytest.mark.usefixtures("unimported")
def test_the_real_one_is_respected():
    real, part = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    real.__file__ = "somewhere/flash_attn/__init__.py"
    sys.modules.update({"flash_attn": real, "flash_attn.bert_padding": part})
    message = (
        "flash_attn must not be imported already, unless force is True; got the one of somewhere/flash_attn/__init__"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        install()
    assert sys.modules["flash_attn"] is real
    with install(force=True):
        assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func
        assert "flash_attn.bert_padding" not in sys.modules
    assert sys.modules["flash_attn"] is real
    assert sys.modules["flash_attn.bert_padding"] is part


def test_importing_compat_imports_no_torch():
    code = "import sys, cs336_systems.compat; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
