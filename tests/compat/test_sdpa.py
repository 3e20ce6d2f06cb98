"""torch's ``scaled_dot_product_attention`` and this library's: equal values and gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from cs336_systems.compat.sdpa import scaled_dot_product_attention

TORCHS = F.scaled_dot_product_attention


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 if actual.dtype == torch.float64 else 2e-5)


def compare(device, dtype, shapes, impl="auto", **options):
    """Values and gradients of q, k, v, and of a mask that requires one, against torch's."""
    leaves = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        leaves.append(mask)
    results = []
    for function, extra in ((scaled_dot_product_attention, {"impl": impl}), (TORCHS, {})):
        out = function(*leaves[:3], **options, **extra)
        dout = torch.cos(torch.arange(out.numel(), dtype=dtype, device=device)).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


SHAPES = {
    "2d": [(5, 8), (7, 8), (7, 3)],
    "3d": [(2, 5, 8), (2, 7, 8), (2, 7, 3)],
    "4d": [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
    "5d": [(2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 3)],
    "batch_kv_shape": [(2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 3)],
    "batch_of_queries": [(1, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
    "heads_kv_shape": [(2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 3)],
    "each_another": [(2, 1, 5, 8), (1, 3, 7, 8), (2, 3, 7, 3)],
    "fewer_axes": [(2, 3, 5, 8), (3, 7, 8), (7, 3)],
    "fewer_axes_of_queries": [(5, 8), (2, 3, 7, 8), (2, 3, 7, 3)],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_broadcast_tensors_are_rounded_once(device, dtype, grouped):
    """After the sum over the batch, as in torch."""
    kv_shape = (16, 2 if grouped else 4, 33, 16)
    leaves = [torch.randn(shape, dtype=dtype, device=device) for shape in ((4, 33, 16), kv_shape, kv_shape)]
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


GROUPED = {
    "3d": [(4, 5, 8), (2, 7, 8), (2, 7, 3)],
    "4d": [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)],
    "5d": [(2, 1, 4, 5, 8), (2, 1, 2, 7, 8), (2, 1, 2, 7, 3)],
    "batch_of_keys": [(2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 3)],
}
CASES = [(shapes, False) for shapes in SHAPES.values()] + [(shapes, True) for shapes in GROUPED.values()]
CASE_NAMES = [*SHAPES, *(f"grouped_{name}" for name in GROUPED)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("shapes", "grouped"), CASES, ids=CASE_NAMES)
def test_shapes(device, dtype, is_causal, shapes, grouped):
    """With more keys than queries, where the two alignments of a causal mask differ."""
    compare(device, dtype, shapes, is_causal=is_causal, scale=0.3, enable_gqa=grouped)


@pytest.mark.parametrize("kind", ["bool", "float", "requires_grad"])
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7)], ids=str)
def test_masks(device, kind, shape):
    mask = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=kind == "requires_grad")
    if kind == "bool":
        mask = (mask > -1) | (torch.arange(mask.shape[-1], device=device) == 0)  # a visible key for each query
    compare(device, torch.float64, SHAPES["4d"], attn_mask=mask)


TWO_MASKS = torch.ones(5, 7, dtype=torch.bool).tril(1), torch.linspace(-2, 2, 35).view(5, 7)


@pytest.mark.parametrize("mask", TWO_MASKS)
@pytest.mark.parametrize(
    ("shapes", "impl"), [("2d", "auto"), ("3d", "auto"), ("5d", "auto"), ("fewer_axes", "auto"), ("4d", "flash")]
)
def test_masks_with_other_shapes_and_kernels(device, shapes, impl, mask):
    compare(device, torch.float32, SHAPES[shapes], impl, attn_mask=mask.to(device))


def test_a_mask_of_grouped_heads_without_a_batch(device):
    mask = torch.randn(4, 5, 7, dtype=torch.float64, device=device, requires_grad=True)
    compare(device, torch.float64, GROUPED["3d"], attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases(device, bias):
    q, k, v = (torch.randn(shape, device=device) for shape in SHAPES["4d"])
    mask = bias(5, 7)._materialize(torch.device(device))
    out = scaled_dot_product_attention(q, k, v, bias(5, 7))
    assert_close(out, TORCHS(q, k, v, mask))


@pytest.mark.parametrize("fill", ["bool", "float"])
def test_queries_without_a_visible_key(device, fill):
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


def test_dropout_uses_torchs_generator(device):
    q, k = (torch.randn(2, 300, 4, device=device) for _ in "qk")
    eye = torch.eye(300, device=device).expand(2, -1, -1)  # the output is the probabilities
    torch.manual_seed(1)
    first = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    second = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    torch.manual_seed(1)
    again = scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    assert (first == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert not torch.equal(first == 0, second == 0)
    assert torch.equal(first, again)
    kept = first != 0
    torch.testing.assert_close(first[kept], TORCHS(q, k, eye)[kept] / 0.75)


def test_under_autocast(device):
    q, k, v = (torch.randn(2, 3, 5, 8, device=device) for _ in "qkv")
    mask = torch.randn(5, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        out, expected = (function(q, k, v, mask) for function in (scaled_dot_product_attention, TORCHS))
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8)
VALID = {"query": Q, "key": K, "value": K, "enable_gqa": True}
BOOLS = torch.ones(5, 7, dtype=torch.bool)
MASK = "attn_mask must be a tensor of bools or floating-point numbers"
BROADCAST = "attn_mask must have a shape that broadcasts to (2, 4, 5, 7)"
AXES = "of query, key and value must broadcast"
INVALID = [
    (TypeError, {"query": [1.0]}, "query must be a torch.Tensor; got list"),
    (TypeError, {"key": K.int()}, "k must have a dtype of float16, bfloat16, float32, float64; got torch.int32"),
    (ValueError, {"value": K[0, 0, 0]}, "value must have at least 2 dimensions (length, head_dim); got (8,)"),
    (TypeError, {"is_causal": 1}, "is_causal must be a bool; got 1 of type int"),
    (TypeError, {"enable_gqa": None}, "enable_gqa must be a bool; got None of type NoneType"),
    (ValueError, {"query": Q[:, :3]}, "k must have a number of heads that divides q's 3; got 2"),
    (TypeError, {"attn_mask": BOOLS.int()}, f"{MASK}; got (5, 7) torch.int32"),
    (TypeError, {"attn_mask": True}, f"{MASK}; got bool"),
    (ValueError, {"dropout_p": 1.5}, "dropout_p must be from 0 to 1; got 1.5"),
    (TypeError, {"scale": "1"}, "scale must be a float or None; got '1' of type str"),
    (RuntimeError, {"query": Q[0, 0]}, "query must have an axis of heads where enable_gqa is True; got (5, 8)"),
    # torch raises RuntimeError too.
    (
        *(RuntimeError, {"attn_mask": BOOLS, "is_causal": True}),
        "attn_mask must be None where is_causal is True; got (5, 7) torch.bool",
    ),
    (
        *(RuntimeError, {"attn_mask": causal_lower_right(4, 7)}),
        "attn_mask must be a CausalBias of sizes (5, 7); got (4, 7)",
    ),
    (
        *(RuntimeError, {"enable_gqa": False}),
        f"the axes before the last 2 {AXES}, and enable_gqa must be True for grouped heads; "
        "got (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)",
    ),
    (
        *(RuntimeError, {"query": torch.zeros(3, 4, 5, 8)}),
        f"the axes before the last 3 {AXES}; got (3, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)",
    ),
    (RuntimeError, {"attn_mask": torch.zeros(5, 8)}, f"{BROADCAST}; got (5, 8)"),
    (RuntimeError, {"attn_mask": torch.zeros(1, 1, 1, 5, 7)}, f"{BROADCAST}; got (1, 1, 1, 5, 7)"),
]


@pytest.mark.parametrize(("error", "change", "message"), INVALID)
def test_invalid_arguments(error, change, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        scaled_dot_product_attention(**VALID | change)


def test_nested_tensors_and_a_positional_scale():
    nested = torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"^query must be a dense \(strided\) tensor; got a nested tensor$"):
        scaled_dot_product_attention(nested, nested, nested)
    with pytest.raises(TypeError, match="positional arguments"):
        scaled_dot_product_attention(Q, Q, Q, None, 0.0, False, 1.0)
