"""Calls within torch.vmap and torch.func, and batches of gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map

from cs336_systems.attention import attention
from cs336_systems.testing import Shapes, make_inputs

from .helpers import COMPILES, FLOAT, HALF, each_function, flat, named, slow
from .test_operators import EVERYTHING, HEADS, calls_of, features_of

pytestmark = COMPILES
BATCHED = {
    "nothing": ((), {"causal": True}),
    "everything": (("bias", "alibi_slopes", "sinks", "mask"), EVERYTHING),
}


def entries(device, dtype=FLOAT):
    """Three calls of q, k and v, stacked."""
    return make_inputs(Shapes.of(3, 2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2), dtype=dtype, device=device)


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("impl", named(["flash", "tiled", "naive", "auto"], ["tiled", "auto"]))
def test_vmap_over_calls(impl, device, name):
    names, settings = BATCHED[name]
    attend = partial(attention, impl=impl, return_lse=impl != "auto", **settings)
    inputs = entries(device)
    made = [{key: x.detach() for key, x in features_of(device).items() if key in names} for _ in range(3)]
    stacked = {key: torch.stack([one[key] for one in made]) for key in names}
    results = torch.vmap(lambda q, k, v, tensors: attend(q, k, v, **tensors))(*inputs[:3], stacked)
    calls = [flat(attend(*[x[i] for x in inputs[:3]], **made[i])) for i in range(3)]
    for result, parts in zip(flat(results), zip(*calls, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


@pytest.mark.parametrize("names", [pytest.param((), marks=slow), ("bias", "mask")])
def test_vmap_over_some_arguments(flash_device, names):
    tensors = {key: x.detach() for key, x in features_of(flash_device).items() if key in names}
    inputs = entries(flash_device)
    q, k, v = inputs.q, inputs.k[0], inputs.v.movedim(0, 2)
    attend = partial(attention, impl="flash", **tensors)
    out = torch.vmap(attend, in_dims=(0, None, 2))(q, k, v)
    torch.testing.assert_close(out, torch.stack([attend(q[i], k, v[:, :, i]) for i in range(3)]))


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_vmap_over_the_backward_operator(impl, device):
    (operator, first), (_, second) = (calls_of(impl, HEADS, device, HALF, everything=True)[1] for _ in range(2))
    is_tensor = [isinstance(x, torch.Tensor) or (isinstance(x, list) and bool(flat(x))) for x in first]
    stacked = [
        tree_map(lambda x, y: torch.stack([x, y]), x, y)
        for x, y, has in zip(first, second, is_tensor, strict=True)
        if has
    ]

    def backward(*tensors):
        rest = iter(tensors)
        return operator(*[next(rest) if has else x for x, has in zip(first, is_tensor, strict=True)])

    results = torch.vmap(backward)(*stacked)
    expected = [flat(operator(*arguments)) for arguments in (first, second)]
    for result, parts in zip(flat(results), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


NAIVE = partial(attention, impl="naive")


def loss(q, k, v, sinks, bias, impl):
    options = {"causal": True, "window": (9, None), "sinks": sinks, "bias": bias}
    out, lse = attention(q, k, v, **options, impl=impl, return_lse=True)
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("impl", named(["flash", "tiled", "naive", "auto"], ["tiled", "auto"]))
def test_gradients_by_torch_func(device, impl):
    """`torch.func.grad` gives what autograd gives of naive, and vmap of it the gradients of each call."""
    stacked = [*entries(device)[:3], torch.randn(3, 4, device=device), torch.randn(3, 4, 5, 9, device=device)]
    gradients = []
    for one in zip(*stacked, strict=True):
        leaves = [x.detach().requires_grad_() for x in one]
        gradients.append(torch.autograd.grad(loss(*leaves, "naive"), leaves))
    expected = tuple(torch.stack(parts) for parts in zip(*gradients, strict=True))
    of_one = torch.func.grad(partial(loss, impl=impl), argnums=(0, 1, 2, 3, 4))
    torch.testing.assert_close(of_one(*[x[1] for x in stacked]), tuple(x[1] for x in expected))
    torch.testing.assert_close(torch.vmap(of_one)(*stacked), expected)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_a_batch_of_gradients(device, impl):
    """autograd's own batches are refused with what to do instead, which gives what naive does of them."""
    q, k, v = (x[0, :1].requires_grad_() for x in entries(device)[:3])
    gradients = torch.randn(3, *q.shape[:-1], v.shape[-1], device=device)
    call = partial(attention, causal=True, impl=impl)
    with pytest.raises(RuntimeError, match=r"use torch\.vmap of what torch\.func\.vjp returns"):
        torch.autograd.grad(call(q, k, v), q, gradients, is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"or torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(lambda q: call(q, k, v).sum((0, 1)), q, vectorize=True)
    of_q, of_naive = (lambda q, by=by: by(q, k, v, causal=True).sum((0, 1))[:2] for by in (call, NAIVE))
    expected = torch.autograd.functional.jacobian(of_naive, q)
    torch.testing.assert_close(torch.func.jacrev(of_q)(q), expected, atol=1e-5, rtol=1e-5)
    _, pull = torch.func.vjp(call, q, k, v)
    expected = torch.autograd.grad(NAIVE(q, k, v, causal=True), (q, k, v), gradients, is_grads_batched=True)
    torch.testing.assert_close(torch.vmap(pull)(gradients), expected)


@each_function
def test_torch_func_refuses_what_cannot_be(impl, device):
    """Second derivatives, and those in forward mode, are naive's alone; "compiled" has no transform at all."""
    q = entries(device).q[0, :1, :1, :3]

    def of_q(q):
        return attention(q, q, q, impl=impl).square().sum()

    with pytest.raises(RuntimeError, match=r"forward-mode|impl='naive' has"):
        torch.func.jacfwd(of_q)(q)
    with pytest.raises(RuntimeError, match=r"differentiated twice; impl='naive' can"):
        torch.func.grad(lambda q: torch.func.grad(of_q)(q).square().sum())(q)
    with pytest.raises(ValueError, match=r"torch\.func does not transform what torch\.compile made"):
        torch.vmap(partial(attention, impl="compiled"))(*entries(device)[:3])
