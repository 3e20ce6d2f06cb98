"""torch.func's transforms of calls, whatever computes them."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import Shapes, make_inputs

IMPLEMENTATIONS = ["flash", "tiled", "naive", "auto"]
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def entries(device):
    """Three calls of q, k and v, stacked."""
    shapes = Shapes.of(3, 2, q_len=7, k_len=40, d=16, q_heads=4, kv_heads=2)
    return make_inputs(shapes, device=device)[:3]


def loss(q, k, v, impl):
    out, lse = attention(q, k, v, causal=True, window=(9, None), impl=impl, return_lse=True)
    return out.square().sum() + lse.sin().sum()


def gradients_of_each(stacked):
    """By naive, one call after the other."""
    gradients = []
    for one in zip(*stacked, strict=True):
        leaves = [x.detach().requires_grad_() for x in one]
        gradients.append(torch.autograd.grad(loss(*leaves, "naive"), leaves))
    return [torch.stack(parts) for parts in zip(*gradients, strict=True)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_vmap(device, impl):
    stacked = entries(device)
    out = torch.vmap(partial(attention, causal=True, impl=impl))(*stacked)
    torch.testing.assert_close(out, attention(*stacked, causal=True, impl="naive"))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_gradients(device, impl):
    stacked = entries(device)
    expected = gradients_of_each(stacked)
    of_one = torch.func.grad(partial(loss, impl=impl), argnums=(0, 1, 2))
    torch.testing.assert_close(of_one(*[x[1] for x in stacked]), tuple(x[1] for x in expected))
    torch.testing.assert_close(torch.vmap(of_one)(*stacked), tuple(expected))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_jacobian(device, impl):
    """Its rows are vmap's entries, which share everything but the gradient of out."""
    q, k, v = (x[0, :1, :2, :4] for x in entries(device))

    def of_q(q):
        return attention(q, k[:, :1], v[:, :1], impl=impl).sum((0, 1))

    jacobian = torch.func.jacrev(of_q)(q)
    expected = torch.autograd.functional.jacobian(of_q, q)
    torch.testing.assert_close(jacobian, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["flash", "tiled"])
def test_a_batch_of_gradients(device, impl):
    """autograd's own batches are refused with what to do instead, which gives what naive does of them."""
    q, k, v = (x[0].requires_grad_() for x in entries(device))
    gradients = torch.randn(3, *q.shape, device=device)
    call = partial(attention, causal=True, impl=impl)
    with pytest.raises(RuntimeError, match=r"use torch\.vmap of what torch\.func\.vjp returns"):
        torch.autograd.grad(call(q, k, v), q, gradients, is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"or torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda q: call(q, k, v).sum((0, 1)), q, vectorize=True)
    _, pull = torch.func.vjp(call, q, k, v)
    naive = attention(q, k, v, causal=True, impl="naive")
    expected = torch.autograd.grad(naive, (q, k, v), gradients, is_grads_batched=True)
    torch.testing.assert_close(torch.vmap(pull)(gradients), expected)
