"""The autograd Functions: how they are called, what they save, and what gradients they take and give."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cs336_systems.attention import FlashAttentionFunction, TiledAttentionFunction, attention
from cs336_systems.testing import (
    LAYOUTS,
    Inputs,
    Shapes,
    assert_within_budget,
    budget_of,
    compare,
    evaluate,
    make_inputs,
    poisoned_memory,
)

from .helpers import FLOAT, HALF, assert_same, check, each_function, named

FUNCTIONS = {"flash": FlashAttentionFunction, "tiled": TiledAttentionFunction}
HEADS = Shapes.of(2, q_len=9, k_len=12, d=16, dv=8, q_heads=2, kv_heads=1)
NO_HEADS = Shapes.of(3, q_len=9, k_len=12, d=16)
GRADIENTS = ("dq", "dk", "dv")
half_and_float = pytest.mark.parametrize("dtype", [HALF, FLOAT])


def leaves(device, shapes=HEADS, **arguments):
    """Inputs, and q, k and v that require gradients."""
    inputs = make_inputs(shapes, device=device, **arguments)
    return inputs, [x.detach().requires_grad_() for x in inputs[:3]]


@each_function
@pytest.mark.parametrize(
    ("shapes", "arguments", "settings"),
    [
        (NO_HEADS, (), {}),
        (HEADS, ("top_left", -1.0), {"causal": "top_left", "scale": -1.0}),
        (NO_HEADS, (True, None, True), {"causal": True, "return_lse": True}),
        (HEADS, ("bottom_right", 2, True), {"causal": True, "scale": 2.0, "return_lse": True}),
    ],
)
def test_apply_takes_what_attention_takes(impl, device, shapes, arguments, settings):
    inputs = make_inputs(shapes, dtype=HALF, device=device)
    results = evaluate(lambda q, k, v: FUNCTIONS[impl].apply(q, k, v, *arguments), inputs)
    assert_same(results, evaluate(partial(attention, impl=impl, **settings), inputs), exact=True)


@each_function
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_the_inputs_the_output_and_one_number_a_row(impl, device, layout):
    """Which is the log-sum-exp."""
    inputs, qkv = leaves(device, HEADS._replace(k=(2, 1, 9, 16), v=(2, 1, 9, 8)), layout=layout)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = FUNCTIONS[impl].apply(*qkv, True)
    expected = {(x.data_ptr(), x.shape, x.stride()) for x in (*qkv, out)}
    assert expected < {(x.data_ptr(), x.shape, x.stride()) for x in saved}
    (rows,) = [x for x in saved if (x.data_ptr(), x.shape, x.stride()) not in expected]
    assert (rows.shape, rows.dtype, len(saved)) == (out.shape[:-1], FLOAT, 5)
    assert_within_budget({"out": out.detach(), "lse": rows}, inputs, causal=True)
    assert [x.shape for x in out.grad_fn.saved_tensors].count(rows.shape) == 1


@each_function
def test_changing_a_saved_tensor_is_noticed(impl, device):
    _, (q, k, v) = leaves(device)
    out = attention(q * 1, k, v, impl=impl)
    out.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@each_function
@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(impl, device, without_gradients):
    _, qkv = leaves(device)
    with without_gradients(), torch.autograd.graph.saved_tensors_hooks(pytest.fail, lambda x: x):
        results = attention(*qkv, impl=impl, return_lse=True)
    for x, recorded in zip(results, attention(*qkv, impl=impl, return_lse=True), strict=True):
        assert not x.requires_grad
        assert torch.equal(x, recorded)


@each_function
@pytest.mark.parametrize("wanted", named(["q", "k", "v", "qk", "qv", "kv"], ["k", "qv"]))
def test_gradients_of_some_inputs_alone(impl, device, wanted):
    inputs = make_inputs(HEADS, dtype=HALF, device=device)
    every = evaluate(partial(attention, impl=impl), inputs)
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in zip("qkv", inputs[:3], strict=True)}
    gradients = torch.autograd.grad(attention(**tensors, impl=impl), [tensors[name] for name in wanted], inputs.dout)
    assert all(torch.equal(x, every[f"d{name}"]) for name, x in zip(wanted, gradients, strict=True))


@each_function
def test_gradients_through_one_result_alone(impl, device):
    inputs, qkv = leaves(device)
    out, lse = attention(*qkv, causal=True, impl=impl, return_lse=True)
    through_out = torch.autograd.grad(out, qkv, inputs.dout, retain_graph=True)
    assert_within_budget(dict(zip(GRADIENTS, through_out, strict=True)), inputs, causal=True)
    with poisoned_memory():
        through_lse = torch.autograd.grad(lse, qkv, inputs.dlse, allow_unused=True, materialize_grads=True)
    results = {"lse": lse.detach(), **dict(zip(GRADIENTS, through_lse, strict=True))}
    assert_within_budget(results, inputs._replace(dout=torch.zeros_like(inputs.dout)), causal=True)


ARRANGED = {
    "transposed": lambda dout: dout.mT.contiguous().mT,
    "of_a_sum": lambda dout: torch.ones((), device=dout.device).expand(dout.shape),
    "one_row_for_all": lambda dout: dout[..., :1, :].expand(dout.shape),
    "misaligned": lambda dout: torch.cat([dout.new_zeros(1), dout.flatten()])[1:].view(dout.shape),
}


@each_function
@pytest.mark.parametrize("name", named(ARRANGED, ["of_a_sum", "misaligned"]))
def test_incoming_gradients_of_any_layout(impl, device, name):
    inputs, attend = make_inputs(HEADS, dtype=HALF, device=device), partial(attention, impl=impl, return_lse=True)
    dout, dlse = ARRANGED[name](inputs.dout), ARRANGED[name](inputs.dlse[..., None])[..., 0]
    with poisoned_memory():
        results = evaluate(attend, inputs._replace(dout=dout, dlse=dlse))
    assert_same(results, evaluate(attend, inputs._replace(dout=dout.contiguous(), dlse=dlse.contiguous())))


@pytest.mark.parametrize("name", named(ARRANGED, ["misaligned"]))
@pytest.mark.parametrize("d", [24, 64, 304])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_torch_takes_incoming_gradients_of_any_layout(dtype, d, device, name):
    """On a GPU its kernels read most of these from wrong addresses, after which no call of the process works."""
    inputs = make_inputs(Shapes.of(2, q_len=70, d=d, q_heads=2), dtype=dtype, device=device)
    inputs = inputs._replace(dout=ARRANGED[name](inputs.dout))
    assert_within_budget(evaluate(partial(attention, impl="sdpa"), inputs), inputs)


@each_function
@pytest.mark.parametrize("layout", ["contiguous", "length_before_heads"])
def test_results_are_laid_out_as_what_they_belong_to(impl, device, layout):
    shapes = Shapes.of(2, q_len=9, k_len=12, d=16, q_heads=4, kv_heads=2)
    inputs = make_inputs(shapes, dtype=HALF, device=device, layout=layout)
    results = evaluate(partial(attention, impl=impl, return_lse=True), inputs)
    for name, like in (("out", inputs.q), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        assert results[name].stride() == like.stride(), name
    assert results["lse"].is_contiguous()


@each_function
def test_one_tensor_as_query_key_and_value(impl, device):
    x, dout = torch.randn(2, 9, 16, device=device, requires_grad=True), torch.randn(2, 9, 16, device=device)
    (gradient,) = torch.autograd.grad(attention(x, x, x, causal=True, impl=impl), x, dout)
    exact, naive, summed, _ = budget_of(Inputs(x, x, x, dout, dout[..., 0]), causal=True, return_lse=False)
    assert summed is not None
    of_one = [{"dx": results["dq"] + results["dk"] + results["dv"]} for results in (exact, naive, summed)]
    assert all(finding.holds for finding in compare({"dx": gradient}, *of_one))


@each_function
def test_the_same_call_gives_the_same_bits(impl, device):
    shapes = Shapes.of(1, q_len=70, k_len=90, d=64, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, device=device, dtype=HALF)
    attend = partial(attention, causal=True, impl=impl, return_lse=True, deterministic=True)
    assert_same(evaluate(attend, inputs), evaluate(attend, inputs), exact=True)


@each_function
@pytest.mark.parametrize("with_loss", [False, True])
@pytest.mark.parametrize("first", [lambda out: out.sum(), lambda out: out.square().sum()], ids=["linear", "square"])
def test_a_second_derivative_is_refused(impl, device, with_loss, first):
    """Never left out of a sum in silence, whatever the first derivative was taken of."""
    q = torch.randn(1, 4, 16, device=device, requires_grad=True)
    out = attention(q, q, q, impl=impl)
    (gradient,) = torch.autograd.grad(first(out), q, create_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(first(out), q)[0])
    with pytest.raises(RuntimeError, match=r"(?i)twice|second derivative|impl='naive'"):
        (gradient.square().sum() + (out.square().sum() if with_loss else 0)).backward()


@each_function
def test_forward_mode_derivatives_are_refused(impl, device):
    """A tangent that is dropped would be a wrong derivative, 0, with nothing said."""
    q = torch.randn(1, 4, 16, device=device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError):
            attention(dual, dual, dual, impl=impl)


@each_function
@half_and_float
def test_rows_that_see_nothing_get_exact_zeros(impl, device, dtype):
    inputs = make_inputs(Shapes.of(2, q_len=75, k_len=10, d=16, q_heads=2), dtype=dtype, device=device)
    results, blind = check(impl, inputs, causal=True), slice(0, 65)
    for name, x in {"out": 0, "dq": 0, "lse": -math.inf}.items():
        assert (results[name].flatten(0, 1)[:, blind] == x).all()
    assert results["lse"][..., 65:].isfinite().all()
    # What they would pass on does not reach keys and values either.
    inputs.dout[..., blind, :] = 1e4
    inputs.dlse[..., blind] = -1e4
    again = evaluate(partial(attention, causal=True, impl=impl, return_lse=True), inputs)
    if dtype == HALF:  # in float32 the largest gradient sets the unit that all are rounded in
        assert_same(again, results, exact=True)


@each_function
@half_and_float
@pytest.mark.parametrize(("name", "value"), [("k", math.nan), ("k", math.inf), ("v", math.nan), ("v", -math.inf)])
def test_a_hidden_key_spoils_no_more_than_in_naive(impl, device, dtype, name, value):
    """Where the softmax's exact zeros meet an infinity or NaN, naive gives NaN; elsewhere nobody may."""
    inputs = make_inputs(Shapes.of(1, q_len=45, d=16), dtype=dtype, device=device)
    attend = partial(attention, causal=True, return_lse=True)
    clean = evaluate(partial(attend, impl=impl), inputs)
    getattr(inputs, name)[:, 30] = value
    results, naive = (evaluate(partial(attend, impl=each), inputs) for each in (impl, "naive"))
    for result, x in naive.items():
        assert results[result][x.isfinite()].isfinite().all(), result
    if name == "k":
        assert naive["out"][:, :30].isfinite().all()
        for result in ("out", "lse"):
            torch.testing.assert_close(results[result][:, :30], clean[result][:, :30])
