"""Statistics of numbers at the ends of their range."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention import score_statistics
from cs336_systems.testing import Shapes

from ..helpers import FLOAT, FLOATS, HALF, each_dtype, each_implementation
from .test_values import check, inputs_of


@each_implementation
def test_one_key_has_no_entropy(impl, device):
    q, k = (300 * x for x in inputs_of(Shapes.of(3, q_len=40, k_len=1, d=16), device=device))
    q.requires_grad_()
    found = score_statistics(q, k, impl=impl)
    assert torch.equal(found.entropy, torch.zeros_like(found.entropy))
    torch.testing.assert_close(found.lse, found.max_scores)
    (dq,) = torch.autograd.grad(found.entropy.sum(), q)
    assert dq.isfinite().all()


@each_implementation
@pytest.mark.parametrize("keys", [2, 70])
def test_equal_scores_have_the_largest_entropy(impl, device, keys):
    found = score_statistics(*(torch.ones(2, n, 16, device=device) for n in (40, keys)), scale=1e4, impl=impl)
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, math.log(keys)))
    torch.testing.assert_close(found.max_scores, torch.full_like(found.entropy, 16e4))


@each_dtype(flash=FLOATS, tiled=(FLOAT, torch.bfloat16), naive=(FLOAT,))
def test_scores_of_ten_thousand(impl, dtype, device):
    """Keys are rounded to 4 bits, so that scores are exact."""
    q = torch.randint(1, 9, (2, 50, 1), device=device).to(dtype).requires_grad_()
    k = torch.randint(-8, 9, (2, 60, 1), device=device).to(dtype).requires_grad_()
    with torch.no_grad():
        exact = score_statistics(q.double(), k.double(), scale=200.0, impl="naive")
    found = score_statistics(q, k, scale=200.0, impl=impl)
    assert float(exact.max_scores.max()) > 1e4
    torch.testing.assert_close([*found], [x.float() for x in exact], rtol=4e-6, atol=4e-6)
    dq, dk = torch.autograd.grad(found.entropy.sum() + found.lse.sum(), (q, k))
    assert dq.isfinite().all()
    assert dk.isfinite().all()


@each_dtype(flash=FLOATS, tiled=(FLOAT,), naive=(FLOAT,))
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_a_probability_of_1_keeps_its_gradient_however_large_scores_are(impl, dtype, device, scale):
    """The gradients of the log-sum-exp and of the entropy by a score are p and -p (log p + H), here 1 and 0."""
    q, k = inputs_of(Shapes.of(2, q_len=40, k_len=50, d=64), dtype, device)
    bias = torch.zeros(2, 40, 50, device=device, requires_grad=True)
    found = score_statistics(q, k, bias=bias, scale=scale, impl=impl)
    certain = found.entropy == 0
    assert certain.sum() > 70
    for name, expected in (("lse", 1.0), ("entropy", 0.0)):
        (gradient,) = torch.autograd.grad(getattr(found, name).sum(), bias, retain_graph=True)
        largest = gradient[certain].abs().amax(-1)
        torch.testing.assert_close(largest, torch.full_like(largest, expected))


@each_dtype(flash=FLOATS, tiled=(FLOAT,), naive=(FLOAT,))
@pytest.mark.parametrize(("offset", "tolerance"), [(1e4, 1e-3), (-1e4, 1e-3), (1e5, 1e-2), (-1e5, 1e-2)])
def test_probabilities_of_large_scores_add_up_to_1(impl, dtype, device, offset, tolerance):
    q, k = inputs_of(Shapes.of(1, q_len=6, k_len=70, d=16), dtype, device)
    bias = torch.full((6, 70), offset, device=device, requires_grad=True)
    found = score_statistics(q, k, bias=bias, impl=impl)
    (gradient,) = torch.autograd.grad(found.lse.sum(), bias)
    torch.testing.assert_close(gradient.sum(-1), torch.ones(6, device=device), rtol=0, atol=tolerance)


@each_implementation
def test_the_ends_of_float32(impl, device):
    """Distances to the maximum overflow, and their exponentials are 0."""
    k = torch.tensor([-1e30, 1e30, 0.0, 1e30], device=device).view(1, 4, 1).expand(2, 4, 1)
    found = score_statistics(torch.full((2, 3, 1), 1e8, device=device), k, scale=2.0, impl=impl)
    assert torch.equal(found.max_scores, torch.full((2, 3), 1e30 * 1e8 * 2.0, device=device))
    torch.testing.assert_close(found.entropy, torch.full((2, 3), math.log(2), device=device))


@each_implementation
def test_scores_of_infinity_and_hidden_rows(impl, device):
    """Row 0 has a bias of -inf alone, row 1 sees nothing, row 2 one key of two, row 3 a bias of +inf."""
    q, k = inputs_of(Shapes.of(1, q_len=4, k_len=40, d=8, q_heads=1), device=device)
    bias = torch.zeros(4, 40, device=device)
    bias[0], bias[2, 2:], bias[2, 1], bias[3, 3] = -math.inf, -math.inf, -200.0, math.inf
    mask = torch.ones(4, 40, dtype=torch.bool, device=device)
    mask[1] = False
    leaves = [x.requires_grad_() for x in (q, k)]
    found = score_statistics(*leaves, bias=bias, mask=mask, impl=impl)
    assert found.lse[0, 0, :2].tolist() == found.max_scores[0, 0, :2].tolist() == [-math.inf] * 2
    assert found.entropy[0, 0, :3].tolist() == [0.0] * 3
    assert found.lse[0, 0, 3] == found.max_scores[0, 0, 3] == math.inf
    assert found.entropy[0, 0, 3].isnan()
    rows = found.entropy[0, 0, :3].sum() + found.lse[0, 0, 2]
    (dq,) = torch.autograd.grad(rows, q)
    assert dq[0, 0, 2].isfinite().all()
    assert torch.equal(dq[0, 0, :2], torch.zeros_like(dq[0, 0, :2]))


@each_implementation
def test_a_nan_is_seen_in_its_row_alone(impl, device):
    q, k = inputs_of(Shapes.of(1, q_len=5, k_len=40, d=8, q_heads=1), device=device)
    q[0, 0, 1, 3] = math.nan
    for x in score_statistics(q, k, impl=impl):
        assert x[0, 0].isnan().tolist() == [False, True, False, False, False]


@each_dtype(flash=FLOATS, tiled=(FLOAT,), naive=(FLOAT,))
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(impl, dtype, device, lengths):
    shapes = Shapes.of(2, q_len=lengths[0], k_len=lengths[1], d=8, q_heads=2, kv_heads=1)
    sinks = torch.randn(2, device=device, requires_grad=True)
    leaves = [x.requires_grad_() for x in inputs_of(shapes, dtype, device)]
    found = score_statistics(*leaves, sinks=sinks, impl=impl)
    assert torch.equal(found.lse, sinks[:, None].expand(2, 2, lengths[0]))
    assert torch.equal(found.max_scores, torch.full_like(found.lse, -math.inf))
    assert torch.equal(found.entropy, torch.zeros_like(found.lse))
    dq, dk, dsinks = torch.autograd.grad((found.lse.sum(), found.entropy.sum()), (*leaves, sinks))
    assert torch.equal(dq, torch.zeros_like(dq))
    assert torch.equal(dk, torch.zeros_like(dk))
    torch.testing.assert_close(dsinks, torch.full_like(dsinks, 2.0 * lengths[0]))


@each_implementation
@pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 1, 3, 7, 8)])
def test_any_number_of_axes(impl, device, shape):
    q, k = (torch.randn(shape, device=device) for _ in "qk")
    found = score_statistics(q, k, causal=True, impl=impl)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(7, 7, device=device).triu(1).bool(), -math.inf)
    torch.testing.assert_close(found.max_scores, scores.amax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    for dtype in (FLOAT, HALF):
        check(impl, (q.to(dtype), k.to(dtype)), causal=True)
