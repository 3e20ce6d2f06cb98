"""The functions of ``flash_attn.layers.rotary`` against rotations of complex numbers, in float64."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from cs336_systems.compat.flash_attn_rotary import apply_rotary_emb, apply_rotary_emb_torch

from .test_flash_attn_cache import rotate

POSITIONS, LENGTH, HEADS, D = 11, 5, 3, 8


@pytest.fixture(params=[4, 3], ids=["whole", "part"])
def tables(request, device):
    angles = torch.rand(POSITIONS, request.param, dtype=torch.float64, device=device) * 6
    return angles.cos(), angles.sin()


each_order = pytest.mark.parametrize("interleaved", [True, False])


def rows(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, HEADS, D, dtype=dtype, device=device, requires_grad=True)


def check(actual, expected, x):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(actual)
    gradients = [torch.autograd.grad(out, x, dout, retain_graph=True)[0] for out in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@each_order
@pytest.mark.parametrize("offsets", [0, 6, [6, 0]])
@pytest.mark.parametrize("inplace", [False, True])
def test_values_and_gradients(device, tables, interleaved, offsets, inplace):
    x = rows(2, LENGTH, device=device)
    firsts = offsets if isinstance(offsets, list) else [offsets] * 2
    expected = torch.stack(
        [rotate(x[i], *tables, [first + j for j in range(LENGTH)], interleaved) for i, first in enumerate(firsts)]
    )
    given = torch.tensor(offsets, dtype=torch.int32, device=device) if isinstance(offsets, list) else offsets
    own = x.clone() if inplace else x
    out = apply_rotary_emb(own, *tables, interleaved, inplace, given)
    assert (out is own) == inplace
    check(out, expected, x)


@each_order
@pytest.mark.parametrize("offsets", [2, [1, 0, 8]])
def test_packed_sequences(device, tables, interleaved, offsets):
    lengths = [4, 0, 3]
    x = rows(sum(lengths), device=device)
    firsts = offsets if isinstance(offsets, list) else [offsets] * 3
    positions = [first + j for first, length in zip(firsts, lengths, strict=True) for j in range(length)]
    given = torch.tensor(offsets, device=device) if isinstance(offsets, list) else offsets
    starts = torch.tensor([0, 4, 4, 7], dtype=torch.int32, device=device)
    out = apply_rotary_emb(x, *tables, interleaved, seqlen_offsets=given, cu_seqlens=starts, max_seqlen=4)
    check(out, rotate(x, *tables, positions, interleaved), x)


@each_order
def test_plain_formula(device, tables, interleaved):
    """With a table for all sequences, or one for each."""
    x = rows(2, LENGTH, device=device)
    cos, sin = (table[:LENGTH] for table in tables)
    expected = torch.stack([rotate(each, cos, sin, list(range(LENGTH)), interleaved) for each in x])
    check(apply_rotary_emb_torch(x, cos, sin, interleaved), expected, x)
    batch = [torch.stack([table[:LENGTH], table[3 : 3 + LENGTH]]) for table in tables]
    later = rotate(x[1], *tables, list(range(3, 3 + LENGTH)), interleaved)
    check(apply_rotary_emb_torch(x, *batch, interleaved), torch.stack([expected[0], later]), x)


def test_16_bits_round_once(device, tables):
    x = rows(2, LENGTH, device=device, dtype=torch.bfloat16)
    expected = torch.stack([rotate(each, *tables, list(range(LENGTH)), False) for each in x])
    out = apply_rotary_emb(x, *(table.float() for table in tables))
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-6)


def test_signatures():
    names = ["x", "cos", "sin", "interleaved", "inplace", "seqlen_offsets", "cu_seqlens", "max_seqlen"]
    parameters = inspect.signature(apply_rotary_emb).parameters
    assert list(parameters) == names
    assert [parameters[name].default for name in names[3:]] == [False, False, 0, None, None]
    assert list(inspect.signature(apply_rotary_emb_torch).parameters) == names[:4]


X, TABLE = torch.zeros(2, 5, 3, 8), torch.zeros(6, 4)
RANGE = "positions, which begin at seqlen_offsets, must be from 0 to 5, the last row of cos; got "
INVALID = [
    ({"x": X[0]}, "x must have 4 axes; got (5, 3, 8)"),
    ({"cos": X}, "cos must have 2 axes; got (2, 5, 3, 8)"),
    ({"sin": None}, "sin must be a tensor of floating-point numbers; got NoneType"),
    ({"x": X.long()}, "x must be a tensor of floating-point numbers; got torch.int64"),
    ({"seqlen_offsets": 2}, RANGE + "2 to 6"),
    ({"seqlen_offsets": -1}, RANGE + "-1 to 3"),
    ({"seqlen_offsets": torch.tensor([0, 2])}, RANGE + "0 to 6"),
    ({"seqlen_offsets": torch.tensor([0, -2])}, RANGE + "-2 to 4"),
    ({"seqlen_offsets": torch.tensor([1])}, "seqlen_offsets must be an int or have shape (2,); got (1,)"),
    (
        {"cos": torch.zeros(6, 5), "sin": torch.zeros(6, 5)},
        "cos and sin must have the same shape, with at most 4 pairs for x of 8 columns; got (6, 5) and (6, 5)",
    ),
]


@pytest.mark.parametrize(("change", "message"), INVALID)
def test_invalid_arguments(change, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        apply_rotary_emb(**({"x": X, "cos": TABLE, "sin": TABLE} | change))
