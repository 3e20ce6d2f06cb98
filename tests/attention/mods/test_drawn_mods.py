"""Functions that hypothesis draws: every implementation computes them and all gradients as torch does."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.attention import attention

from ..helpers import slow

BATCH, HEADS, LENGTH, DIM = 2, 2, 19, 8
SIZES = (BATCH, HEADS, LENGTH, LENGTH)
PLACES = [torch.arange(size).view([-1 if axis == own else 1 for axis in range(4)]) for own, size in enumerate(SIZES)]
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 3, (BATCH, LENGTH), generator=GENERATOR)


def leaf(*shape):
    return torch.randn(*shape, generator=GENERATOR, requires_grad=True)


SLOPES, ROWS, COLUMNS, TABLE, BIAS = leaf(HEADS), leaf(LENGTH), leaf(BATCH, LENGTH), leaf(2 * LENGTH), leaf(*SIZES)
CAPTURED = [SLOPES, ROWS, COLUMNS, TABLE, BIAS]
LEAVES = {
    "score": lambda s, b, h, q, k: s,
    "distance": lambda s, b, h, q, k: (q - k) / 8,
    "slope": lambda s, b, h, q, k: SLOPES[h],
    "row": lambda s, b, h, q, k: ROWS[q],
    "column": lambda s, b, h, q, k: COLUMNS[b, k],
    "by_distance": lambda s, b, h, q, k: TABLE[q - k + LENGTH - 1],
    "bias": lambda s, b, h, q, k: BIAS[b, h, q, k],
}
UNARY = {
    "abs": torch.abs,
    "neg": operator.neg,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-1.0, 0.7),
    "decay": lambda x: torch.exp(-x.abs()),
    "square": lambda x: x * x / 3,
    "sine": torch.sin,
    "gelu": torch.nn.functional.gelu,
}
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "largest": torch.maximum,
    "smallest": torch.minimum,
}
CONDITIONS = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "blocks": lambda b, h, q, k: (q // 4 == k // 4) | (h % 2 == 0),
    "stripes": lambda b, h, q, k: ~((q - k) % 3 == 1),
    "sign": lambda b, h, q, k: ROWS[q] > 0,
}
"""Comparisons that no rounding decides."""


def unary(name, inner):
    return lambda *pair: UNARY[name](inner(*pair))


def binary(name, one, other):
    return lambda *pair: BINARY[name](one(*pair), other(*pair))


def chosen(name, one, other):
    return lambda s, *pair: torch.where(CONDITIONS[name](*pair), one(s, *pair), other(s, *pair))


def constant(value):
    return lambda s, b, h, q, k: s * 0 + value


VALUES = st.recursive(
    st.one_of(st.sampled_from([*LEAVES.values()]), st.builds(constant, st.floats(-2, 2, width=16))),
    lambda inner: st.one_of(
        st.builds(unary, st.sampled_from([*UNARY]), inner),
        st.builds(binary, st.sampled_from([*BINARY]), inner, inner),
        st.builds(chosen, st.sampled_from([*CONDITIONS]), inner, inner),
    ),
    max_leaves=6,
)
MASKS = st.recursive(
    st.sampled_from([*CONDITIONS.values()]),
    lambda inner: st.builds(
        lambda op, one, other: lambda *pair: op(one(*pair), other(*pair)),
        st.sampled_from([operator.and_, operator.or_, operator.xor]),
        inner,
        inner,
    ),
    max_leaves=3,
)


def check(impl, value, mask):
    def score(s, b, h, q, k):
        return s + 2 * torch.tanh(value(s, b, h, q, k) / 2)

    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator, requires_grad=True) for _ in range(3)]
    q, k, v = (x.double() for x in inputs)
    scores = score(q @ k.mT / DIM**0.5, *PLACES).masked_fill(~mask(*PLACES), float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    expected = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ v
    dout = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    inputs += CAPTURED
    wanted = torch.autograd.grad(expected, inputs, dout, allow_unused=True)
    out = attention(*inputs[:3], scores=score, mask=mask, impl=impl)
    found = torch.autograd.grad(out, inputs, dout.float(), allow_unused=True)
    for own, other in zip([out, *found], [expected, *wanted], strict=True):
        own, other = (torch.zeros(()) if x is None else x.detach() for x in (own, other))
        assert (own - other).abs().max() <= 2e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("impl", ["naive", "tiled"])
@settings(max_examples=25, deadline=None)
@given(VALUES, MASKS)
def test_drawn_functions(impl, value, mask):
    check(impl, value, mask)


@slow
@settings(max_examples=10, deadline=None)  # each takes seconds to interpret, or to compile
@given(VALUES, MASKS)
def test_drawn_functions_in_kernels(value, mask):
    check("flash", value, mask)
