"""Nested tensors in and out: what packed sequences give, with lengths of their own."""

from __future__ import annotations

import re

import pytest
import torch

from cs336_systems.attention import Attention, attention
from cs336_systems.testing import Inputs, assert_within_budget, starts_of

from .helpers import COMPILES, named, one_graph, slow

LENGTHS = (5, 0, 4, 11)
IMPLEMENTATIONS = ["flash", "tiled", "naive", "auto"]


def nested(starts, heads, d=16, dtype=torch.float32):
    """(batch, heads, *, d)."""
    values = torch.randn(int(starts[-1]), heads, d, dtype=dtype, device=starts.device)
    return torch.nested.nested_tensor_from_jagged(values, starts).transpose(1, 2).detach().requires_grad_()


def made(device, k_lengths=LENGTHS):
    starts, k_starts = starts_of(LENGTHS, device).long(), starts_of(k_lengths, device).long()
    return nested(starts, 4), nested(k_starts, 2), nested(k_starts, 2)


@pytest.mark.parametrize("k_lengths", [pytest.param(LENGTHS, marks=slow), (3, 1, 9, 20)], ids=["self", "cross"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_each_sequence_gives_what_it_gives_by_itself(impl, device, k_lengths):
    inputs = made(device, k_lengths)
    out, lse = attention(*inputs, causal=True, softcap=3.0, impl=impl, return_lse=True)
    assert out.shape[:2] == (4, 4)
    assert out.shape[2] == inputs[0].shape[2]
    assert lse.shape == out.shape[:3]
    gradients = torch.autograd.grad((out.values().sum(), lse.values().sum()), inputs)
    for q, k, v, *own in zip(*[x.detach().unbind() for x in (*inputs, out, lse, *gradients)], strict=True):
        results = dict(zip(("out", "lse", "dq", "dk", "dv"), (x[None] for x in own), strict=True))
        ones = torch.ones_like(results["out"]), torch.ones_like(results["lse"])
        alone = Inputs(q[None], k[None], v[None], *ones)
        assert_within_budget(results, alone, causal=True, features={"softcap": 3.0})


def test_results_fit_the_queries(device):
    q, k, v = made(device)
    assert (attention(q, k, v) + q).shape == q.shape
    assert Attention(causal=True)(q, k, v).shape == q.shape


class TestCompiled:
    pytestmark = COMPILES

    @pytest.mark.parametrize("impl", named(["flash", "naive"], []))
    def test_one_graph_for_all_lengths(self, impl, device):
        attend = one_graph(lambda *qkv: attention(*qkv, causal=True, impl=impl))
        for lengths in ((3, 6), (7, 14, 2)):
            starts = starts_of(lengths, device).long()
            inputs = nested(starts, 4), nested(starts, 2), nested(starts, 2)
            expected = attention(*inputs, causal=True, impl=impl)
            torch.testing.assert_close(attend(*inputs).values(), expected.values())


JAGGED = "must be a nested tensor of layout torch.jagged, as q, k and v all are"
DENSE = torch.zeros(4, 2, 5, 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": DENSE}, TypeError, f"k {JAGGED}; got layout torch.strided"),
        ({"v": None}, TypeError, f"v {JAGGED}; got NoneType"),
        ({"q": torch.zeros(4, 4, 5, 16)}, TypeError, "k must be a dense (strided) tensor; got a nested tensor"),
        (
            {"v": nested(starts_of((1, 2, 8, 9)).long(), 2)},
            ValueError,
            "v must have the lengths of k, from the same offsets; got others",
        ),
        (
            {"q": torch.nested.nested_tensor([torch.zeros(2, 16)], layout=torch.jagged)},
            ValueError,
            "q must be nested as (batch, heads, length, d), without holes; got 3 dimensions",
        ),
    ],
)
def test_errors(change, error, message):
    arguments = dict(zip("qkv", made("cpu"), strict=True)) | change
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        attention(**arguments)
