"""What surrounds attention in a training step: autocast, activation checkpointing, modules."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336_systems.attention import (
    Attention,
    CompiledAttention,
    FlashAttention,
    FlashAttentionFunction,
    Implementation,
    NaiveAttention,
    SDPAAttention,
    TiledAttention,
    TiledAttentionFunction,
    attention,
    explain,
)
from cs336_systems.testing import Shapes, evaluate, make_inputs

from .features import Maker
from .helpers import BFLOAT, DOUBLE, FLOAT, HALF, assert_same, each_function, each_implementation, sizes_of

SHAPES = Shapes.of(2, q_len=9, k_len=12, d=16, q_heads=2, kv_heads=1)
FUNCTIONS = {"flash": FlashAttentionFunction, "tiled": TiledAttentionFunction}


def autocast_to(dtype, attend):
    def call(q, k, v, **features):
        with torch.autocast(q.device.type, dtype):
            return attend(q, k, v, **features)

    return call


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive", "sdpa", "auto"])
def test_autocast_is_a_cast_of_the_inputs(impl, dtype, device):
    inputs = make_inputs(SHAPES, device=device)
    inputs = inputs._replace(dout=inputs.dout.to(dtype))
    attend = partial(attention, causal="top_left", impl=impl)
    results = evaluate(autocast_to(dtype, attend), inputs)
    expected = evaluate(lambda *qkv: attend(*[x.to(dtype) for x in qkv]), inputs)
    assert_same(results, expected, exact=impl != "sdpa")  # which adds in no fixed order
    assert [x.dtype for x in results.values()] == [dtype, FLOAT, FLOAT, FLOAT]


@each_implementation
def test_autocast_leaves_features_in_their_dtype(impl, device):
    """Only q, k and v are cast; gradients come in the dtype that each tensor has."""
    inputs, make = make_inputs(SHAPES, device=device), Maker(sizes_of(SHAPES), FLOAT, device)
    features = make.bias("hqk") | make.slopes() | make.sinks() | make.mask("bk")
    half = inputs.to(HALF)._replace(dlse=inputs.dlse)
    attend = partial(attention, impl=impl, softcap=2.0, return_lse=True)
    results = evaluate(autocast_to(HALF, attend), inputs._replace(dout=half.dout), features)
    assert {name: x.dtype for name, x in results.items()} == dict.fromkeys(results, FLOAT) | {"out": HALF}
    expected = evaluate(attend, half, features)
    assert_same(results, {name: x.to(results[name].dtype) for name, x in expected.items()})


@each_function
def test_functions_called_directly_autocast_too(impl, device):
    inputs = make_inputs(SHAPES, device=device)
    inputs = inputs._replace(dout=inputs.dout.half())
    expected = evaluate(autocast_to(HALF, partial(attention, causal=True, impl=impl, return_lse=True)), inputs)
    apply = autocast_to(HALF, lambda q, k, v: FUNCTIONS[impl].apply(q, k, v, True, None, True))
    assert_same(evaluate(apply, inputs), expected, exact=True)


@each_function
def test_the_backward_under_autocast_is_the_same(impl, device):
    """Nothing in it may be cast once more."""
    inputs = make_inputs(SHAPES, dtype=HALF, device=device)
    plain = evaluate(partial(attention, causal=True, impl=impl, return_lse=True), inputs)
    with torch.autocast(device.type, BFLOAT if device.type == "cuda" else HALF):
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        with torch.autocast(device.type, enabled=False):
            outputs = attention(q, k, v, causal=True, impl=impl, return_lse=True)
        gradients = torch.autograd.grad(outputs, (q, k, v), (inputs.dout, inputs.dlse))
    assert all(torch.equal(x, plain[name]) for name, x in zip(("dq", "dk", "dv"), gradients, strict=True))


def test_autocast_joins_dtypes_and_leaves_float64_alone(device):
    q, k, v = torch.randn(3, 2, 5, 16, device=device)
    with torch.autocast(device.type, BFLOAT):
        assert attention(q, k.half(), v.bfloat16()).dtype == BFLOAT
        assert attention(q.double(), k.double(), v.double()).dtype == DOUBLE
        assert explain(q, k.half(), v).choice in Implementation
        with pytest.raises(TypeError, match=r"got torch\.float64"):
            explain(q, k, v.double())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("impl", ["flash", "tiled", "auto"])
def test_activation_checkpointing_changes_nothing(impl, device, use_reentrant):
    inputs = make_inputs(SHAPES, dtype=HALF, device=device)
    attend = partial(attention, causal=True, impl=impl)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    out.backward(inputs.dout)  # torch.autograd.grad is not for reentrant checkpoints
    results = zip(("out", "dq", "dk", "dv"), (out, q.grad, k.grad, v.grad), strict=True)
    assert_same(dict(results), evaluate(attend, inputs), exact=True)


@each_function
def test_selective_checkpointing_can_keep_the_result(impl, device):
    """The operator has a name that a policy can ask for, so that it alone is not computed again."""
    forwards = []

    def policy(ctx, operator, *args, **kwargs):
        is_forward = f"{impl}_forward" in str(operator)
        if is_forward and not ctx.is_recompute:
            forwards.append(operator)
        return CheckpointPolicy.MUST_SAVE if is_forward else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = make_inputs(SHAPES, dtype=HALF, device=device)
    attend = partial(attention, causal=True, impl=impl)
    settings = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, policy)}
    results = evaluate(lambda q, k, v: checkpoint(attend, q * 1, k, v, **settings), inputs)
    assert_same(results, evaluate(attend, inputs), exact=True)
    assert len(forwards) == 1


MODULES = {
    "flash": FlashAttention,
    "tiled": TiledAttention,
    "naive": NaiveAttention,
    "sdpa": SDPAAttention,
    "compiled": CompiledAttention,
}


@pytest.mark.parametrize("impl", [name for name in MODULES if name != "compiled"])
def test_a_module_is_attention_with_its_settings_and_features(impl, device):
    inputs = make_inputs(SHAPES, dtype=HALF, device=device)
    settings, features, asked = {"causal": "top_left", "scale": 0.3}, {}, {}
    if impl != "sdpa":
        make, asked = Maker(sizes_of(SHAPES), HALF, device), {"return_lse": True}
        settings |= {"window": (5, None), "softcap": 3.0}
        features = make.bias("hqk") | make.slopes() | make.sinks() | make.mask("bk") | make.rules()
    expected = evaluate(partial(attention, impl=impl, **settings, **asked), inputs, features)
    for module in (MODULES[impl](**settings), Attention(impl=impl, **settings)):
        assert_same(evaluate(partial(module, **asked), inputs, features), expected, exact=impl != "sdpa")


@pytest.mark.parametrize("impl", MODULES)
def test_modules_have_settings_and_no_state(impl):
    module = MODULES[impl](causal=True, scale=0.5)
    assert isinstance(module, Attention)
    assert (list(module.parameters()), module.state_dict()) == ([], {})
    assert repr(module) == f"{MODULES[impl].__name__}(causal=True, scale=0.5, impl='{impl}')"
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)
    every = Attention(window=(3, None), softcap=5.0, dropout_p=0.5, deterministic=True, impl=Implementation(impl))
    more = "window=(3, None), softcap=5.0, deterministic=True, dropout_p=0.5"
    assert repr(every) == f"Attention(causal=False, scale=None, impl='{impl}', {more})"


def test_a_module_drops_weights_in_training_alone():
    q, module = torch.randn(2, 4, 9, 8), NaiveAttention(dropout_p=0.5)
    expected = attention(q, q, q, impl="naive", dropout_p=0.5, seed=3)
    torch.testing.assert_close(module(q, q, q, seed=3), expected)
    torch.testing.assert_close(module.eval()(q, q, q, seed=3), attention(q, q, q, impl="naive"))
