"""torch's ``scaled_dot_product_attention`` and this library's: values, gradients, and one in the other's place."""

from __future__ import annotations

import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cs336_systems.attention import attention
from cs336_systems.compat import sdpa
from cs336_systems.compat.sdpa import replaced, scaled_dot_product_attention

TORCHS_OWN = F.scaled_dot_product_attention


def close(actual, expected, dtype, what):
    error = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    assert error < (1e-12 if dtype == torch.float64 else 2e-5), f"{what}: {error}"


def compare(device, dtype, shapes, impl="auto", **options):
    """Values and gradients of q, k, v, and of a mask that needs one, against torch's."""
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    mask = options.get("attn_mask")
    leaves = [q, k, v, *([mask] if mask is not None and mask.requires_grad else [])]
    results = []
    for function, extra in ((scaled_dot_product_attention, {"impl": impl}), (TORCHS_OWN, {})):
        out = function(q, k, v, **options, **extra)
        dout = torch.cos(torch.arange(out.numel(), dtype=dtype, device=device)).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for name, actual, expected in zip(("out", "dq", "dk", "dv", "dmask"), *results, strict=False):
        close(actual, expected, dtype, name)


SHAPES = {
    "2d": [(5, 8), (7, 8), (7, 3)],
    "3d": [(2, 5, 8), (2, 7, 8), (2, 7, 3)],
    "4d": [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
    "5d": [(2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 3)],
    "batch_of_keys": [(2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 3)],
    "batch_of_queries": [(1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
    "heads_of_keys": [(2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 3)],
    "each_another": [(2, 1, 5, 8), (1, 3, 7, 8), (2, 3, 7, 3)],
    "fewer_axes": [(2, 3, 5, 8), (3, 7, 8), (7, 3)],
    "fewer_axes_of_queries": [(5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_what_is_broadcast_are_rounded_once(device, dtype, grouped):
    """They are sums over the batch, of which torch rounds no term either."""
    of_keys = (16, 2 if grouped else 4, 33, 16)
    leaves = [torch.randn(shape, dtype=dtype, device=device) for shape in ((4, 33, 16), of_keys, of_keys)]
    leaves = [x.requires_grad_() for x in leaves]
    out = scaled_dot_product_attention(*leaves, enable_gqa=grouped)
    dout = torch.randn_like(out)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = scaled_dot_product_attention(*wide, enable_gqa=grouped, impl="naive")
    expected = torch.autograd.grad(exact, wide, dout.double())
    for name, actual, right in zip("qkv", torch.autograd.grad(out, leaves, dout), expected, strict=True):
        rounding = torch.finfo(dtype).eps / 2 * right.abs().max()
        assert (actual.double() - right).abs().max() <= 1.01 * rounding, name
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes(device, dtype, is_causal, shapes):
    """The causal ones have more keys than queries, where the two alignments differ."""
    compare(device, dtype, shapes, is_causal=is_causal, scale=0.3)


GROUPED = {
    "3d": [(4, 5, 8), (2, 7, 8), (2, 7, 3)],
    "4d": [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)],
    "5d": [(2, 1, 4, 5, 8), (2, 1, 2, 7, 8), (2, 1, 2, 7, 3)],
    "batch_of_keys": [(2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 3)],
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shapes", GROUPED.values(), ids=GROUPED)
def test_grouped_heads(device, is_causal, shapes):
    compare(device, torch.float64, shapes, is_causal=is_causal, enable_gqa=True)


MASKS = {
    "2d": (5, 7),
    "keys": (1, 7),
    "queries": (5, 1),
    "heads": (3, 5, 7),
    "batch": (2, 1, 1, 7),
    "all": (2, 3, 5, 7),
}


@pytest.mark.parametrize("kind", ["bool", "float", "needs_gradient"])
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks(device, kind, shape):
    mask = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=kind == "needs_gradient")
    if kind == "bool":
        first = torch.arange(mask.shape[-1], device=device) == 0
        mask = (mask > -1) | first  # each query sees a key
    compare(device, torch.float64, SHAPES["4d"], attn_mask=mask)


@pytest.mark.parametrize("mask", [torch.ones(5, 7, dtype=torch.bool).tril(1), torch.linspace(-2, 2, 35).view(5, 7)])
@pytest.mark.parametrize("shapes", ["2d", "3d", "5d", "fewer_axes"])
def test_masks_of_other_shapes(device, shapes, mask):
    compare(device, torch.float32, SHAPES[shapes], attn_mask=mask.to(device))


def test_a_mask_with_grouped_heads_and_no_batch_is_that_of_heads(device):
    mask = torch.randn(4, 5, 7, dtype=torch.float64, device=device, requires_grad=True)
    compare(device, torch.float64, GROUPED["3d"], attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("mask", [torch.ones(5, 7, dtype=torch.bool).tril(1), torch.linspace(-2, 2, 35).view(5, 7)])
def test_kernels_get_the_mask(flash_device, mask):
    mask = mask.to(flash_device)
    compare(flash_device, torch.float32, SHAPES["4d"], impl="flash", attn_mask=mask)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_torch_s_causal_biases(device, bias):
    """Against a mask: torch itself has no gradients for all of them."""
    q, k, v = (torch.randn(shape, device=device) for shape in SHAPES["4d"])
    mask = bias(5, 7)._materialize(torch.device(device))
    out = scaled_dot_product_attention(q, k, v, bias(5, 7))
    close(out, TORCHS_OWN(q, k, v, mask), torch.float32, "out")


@pytest.mark.parametrize("fill", ["bool", "float"])
def test_queries_that_see_no_key_get_0(device, fill):
    q, k, v = (torch.randn(2, 5, 4, device=device, requires_grad=True) for _ in "qkv")
    seen = torch.ones(5, 5, dtype=torch.bool, device=device)
    seen[1:3] = False
    mask = seen if fill == "bool" else torch.zeros(5, 5, device=device).masked_fill(~seen, -torch.inf)
    out = scaled_dot_product_attention(q, k, v, mask)
    assert (out[:, 1:3] == 0).all()
    assert (out[:, 0] != 0).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][:, 1:3] == 0).all()


def test_dropout_is_always_applied_and_drawn_from_torch_s_generator(device):
    q, k = (torch.randn(2, 300, 4, device=device) for _ in "qk")
    eye = torch.eye(300, device=device).expand(2, -1, -1)  # the output is the weights
    torch.manual_seed(1)
    first = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    second = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    torch.manual_seed(1)
    again = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(first, again)
    kept = first != 0
    torch.testing.assert_close(first[kept], TORCHS_OWN(q, k, eye)[kept] / 0.75)


def test_under_autocast(device):
    q, k, v = (torch.randn(2, 3, 5, 8, device=device) for _ in "qkv")
    mask = torch.randn(5, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, expected = (function(q, k, v, mask) for function in (scaled_dot_product_attention, TORCHS_OWN))
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
SEES = torch.ones(5, 7, dtype=torch.bool)
FLOATS = "float16, bfloat16, float32, float64"
WRONG = {
    "query": (TypeError, {"query": [1.0]}, "query must be a torch.Tensor; got list"),
    "key": (TypeError, {"key": K.int()}, f"key must have a dtype of {FLOATS}; got torch.int32"),
    "value": (ValueError, {"value": K[0, 0, 0]}, "value must have at least 2 dimensions (length, head_dim); got (8,)"),
    "is_causal": (TypeError, {"is_causal": 1}, "is_causal must be a bool; got 1 of type int"),
    "enable_gqa": (TypeError, {"enable_gqa": None}, "enable_gqa must be a bool; got None of type NoneType"),
    "both": (
        RuntimeError,
        {"attn_mask": SEES, "is_causal": True},
        "attn_mask must be None where is_causal is True; got (5, 7) torch.bool",
    ),
    "heads": (
        RuntimeError,
        {"enable_gqa": False},
        "the axes before query's, key's and value's last 2 must broadcast, and enable_gqa must be True for grouped "
        "heads; got (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)",
    ),
    "batch": (
        RuntimeError,
        {"query": torch.zeros(3, 4, 5, 8)},
        "the axes before query's, key's and value's last 3 must broadcast; "
        "got (3, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)",
    ),
    "no_heads": (
        RuntimeError,
        {"query": Q[0, 0]},
        "query must have an axis of heads where enable_gqa is True; got (5, 8)",
    ),
    "indivisible": (ValueError, {"query": Q[:, :3]}, "k must have a number of heads that divides q's 3; got 2"),
    "mask_of_integers": (
        TypeError,
        {"attn_mask": SEES.int()},
        "attn_mask must be a tensor of bools or floating-point numbers; got (5, 7) torch.int32",
    ),
    "mask_of_no_tensor": (
        TypeError,
        {"attn_mask": True},
        "attn_mask must be a tensor of bools or floating-point numbers; got bool",
    ),
    "mask_of_too_many_keys": (
        RuntimeError,
        {"attn_mask": torch.zeros(5, 8)},
        "attn_mask must have a shape that broadcasts to (2, 4, 5, 7); got (5, 8)",
    ),
    "mask_of_too_many_axes": (
        RuntimeError,
        {"attn_mask": torch.zeros(1, 1, 1, 5, 7)},
        "attn_mask must have a shape that broadcasts to (2, 4, 5, 7); got (1, 1, 1, 5, 7)",
    ),
    "causal_bias": (
        RuntimeError,
        {"attn_mask": causal_lower_right(4, 7)},
        "attn_mask must be a CausalBias of sizes (5, 7); got (4, 7)",
    ),
    "dropout_p": (ValueError, {"dropout_p": 1.5}, "dropout_p must be from 0 to 1; got 1.5"),
    "scale": (TypeError, {"scale": "1"}, "scale must be a float or None; got '1' of type str"),
}


@pytest.mark.parametrize(("error", "wrong", "message"), WRONG.values(), ids=WRONG)
def test_errors(error, wrong, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        scaled_dot_product_attention(**{"query": Q, "key": K, "value": K, "enable_gqa": True} | wrong)


@pytest.mark.parametrize("wrong", ["heads", "batch", "mask_of_too_many_keys", "mask_of_too_many_axes"])
def test_torch_refuses_the_same_by_the_same_type(wrong):
    """But for a mask and is_causal together, which its documentation refuses, and only some of its kernels."""
    _, arguments, _ = WRONG[wrong]
    with pytest.raises(RuntimeError):
        TORCHS_OWN(**{"query": Q, "key": K, "value": K, "enable_gqa": True} | arguments)


def test_scale_is_a_keyword():
    with pytest.raises(TypeError, match="positional arguments"):
        scaled_dot_product_attention(Q, Q, Q, None, 0.0, False, 1.0)


@pytest.fixture
def traced(monkeypatch):
    """The ``impl`` of each call of `attention` from the module."""
    calls = []

    def record(*args, impl, **options):
        calls.append(impl)
        return attention(*args, impl=impl, **options)

    monkeypatch.setattr(sdpa, "attention", record)
    return calls


def test_replaced_takes_the_place_of_torch_s(traced):
    q = torch.randn(2, 3, 5, 8)
    with replaced("naive"):
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert traced == ["naive"]
    close(out, F.scaled_dot_product_attention(q, q, q), torch.float32, "out")
    assert traced == ["naive"]
    assert F.scaled_dot_product_attention is TORCHS_OWN


def test_replaced_is_taken_back_after_an_exception():
    with pytest.raises(TypeError, match=r"^query must be a torch\.Tensor"), replaced():
        F.scaled_dot_product_attention([1.0], [1.0], [1.0])
    assert F.scaled_dot_product_attention is TORCHS_OWN


def test_replaced_in_itself(traced):
    q = torch.randn(1, 1, 2, 4)
    with replaced("naive"):
        with replaced("tiled"):
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    assert traced == ["tiled", "naive"]
    assert F.scaled_dot_product_attention is TORCHS_OWN


def test_replaced_as_a_decorator(traced):
    @replaced("tiled")
    def attend(q):
        return F.scaled_dot_product_attention(q, q, q)

    for _ in range(2):
        attend(torch.randn(1, 1, 2, 4))
        assert F.scaled_dot_product_attention is TORCHS_OWN
    assert traced == ["tiled", "tiled"]


def test_replaced_for_every_thread(traced):
    q = torch.randn(1, 1, 2, 4)
    with replaced("tiled"):
        thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q))
        thread.start()
        thread.join()
    assert traced == ["tiled"]


def test_replaced_refuses_what_is_no_implementation():
    with pytest.raises(ValueError, match=r"^impl must be one of .*; got 'fast'$"), replaced("fast"):
        pytest.fail("it was taken")
    assert F.scaled_dot_product_attention is TORCHS_OWN


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_attention_reaches_torch_s_own_inside_of_replaced(device, causal):
    q, k, v = (torch.randn(shape, device=device) for shape in SHAPES["4d"])
    with replaced("sdpa"):
        out = attention(q, k, v, causal=causal, impl="sdpa")
        again = F.scaled_dot_product_attention(q, k, v, is_causal=causal == "top_left")
    close(out, attention(q, k, v, causal=causal, impl="naive"), torch.float32, "out")
    if causal != "bottom_right":
        close(again, out, torch.float32, "again")


def trained(module, *inputs, **options):
    """What a module returns in training mode, and its gradients."""
    out = module(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_modules_of_torch_train_inside_of_replaced(device, traced, kind, masks):
    x = torch.randn(2, 6, 16, device=device, dtype=torch.float64)
    options: dict[str, object] = {}
    if masks in ("padding", "both"):
        padded = torch.arange(6, device=device) >= torch.tensor([[6], [4]], device=device)
        options["key_padding_mask" if kind == "attention" else "src_key_padding_mask"] = padded
    if masks in ("causal", "both"):
        causal = torch.ones(6, 6, device=device, dtype=torch.bool).triu(1)
        options["attn_mask" if kind == "attention" else "src_mask"] = causal
    settings = {"batch_first": True, "dropout": 0.0, "device": device, "dtype": torch.float64}
    if kind == "attention":
        module: nn.Module = nn.MultiheadAttention(16, 4, **settings)
        inputs = [x, x, x]
        options["need_weights"] = False
    else:
        module = nn.TransformerEncoderLayer(16, 4, 32, **settings)
        inputs = [x]
    expected = trained(module, *inputs, **options)
    with replaced():
        actual = trained(module, *inputs, **options)
    assert traced == ["auto"]
    for index, (mine, torchs) in enumerate(zip(actual, expected, strict=True)):
        close(mine, torchs, torch.float64, f"result {index}")
