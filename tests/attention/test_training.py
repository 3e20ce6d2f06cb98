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

SHAPES = Shapes.of(2, q_len=9, k_len=12, d=16, q_heads=4, kv_heads=2)
FUNCTIONS = {"flash": FlashAttentionFunction, "tiled": TiledAttentionFunction}


def same(results, expected, exactly=True):
    """The same dtypes and the same bits, or nearly where an implementation adds in no fixed order."""
    assert results.keys() == expected.keys()
    for name, x in expected.items():
        tolerances = {"rtol": 0.0, "atol": 0.0} if exactly else {}
        torch.testing.assert_close(results[name], x, msg=lambda text, name=name: f"{name}: {text}", **tolerances)


def autocast_to(dtype):
    def under(attend):
        def call(q, k, v):
            with torch.autocast(q.device.type, dtype):
                return attend(q, k, v)

        return call

    return under


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive", "sdpa", "auto"])
def test_autocast_is_a_cast_of_the_inputs(impl, dtype, device):
    inputs = make_inputs(SHAPES, device=device)
    inputs = inputs._replace(dout=inputs.dout.to(dtype))
    attend = partial(attention, causal="top_left", impl=impl)

    def cast(q, k, v):
        return attend(q.to(dtype), k.to(dtype), v.to(dtype))

    results = evaluate(autocast_to(dtype)(attend), inputs)
    same(results, evaluate(cast, inputs), exactly=impl != "sdpa")
    assert {name: x.dtype for name, x in results.items()} == {
        "out": dtype,
        "dq": torch.float32,
        "dk": torch.float32,
        "dv": torch.float32,
    }


@pytest.mark.parametrize("impl", FUNCTIONS)
def test_functions_called_directly_autocast_too(impl, device):
    inputs = make_inputs(SHAPES, device=device)
    inputs = inputs._replace(dout=inputs.dout.half())

    def apply(q, k, v):
        return FUNCTIONS[impl].apply(q, k, v, True, None, True)

    expected = evaluate(autocast_to(torch.float16)(partial(attention, causal=True, impl=impl, return_lse=True)), inputs)
    same(evaluate(autocast_to(torch.float16)(apply), inputs), expected)


@pytest.mark.parametrize("impl", ["flash", "tiled"])
def test_the_backward_under_autocast_is_the_same(impl, device):
    """Nothing in it may be cast once more."""
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=device)
    plain = evaluate(partial(attention, causal=True, impl=impl, return_lse=True), inputs)
    with torch.autocast(device.type, torch.bfloat16 if device.type == "cuda" else torch.float16):
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        with torch.autocast(device.type, enabled=False):
            outputs = attention(q, k, v, causal=True, impl=impl, return_lse=True)
        gradients = torch.autograd.grad(outputs, (q, k, v), (inputs.dout, inputs.dlse))
    same(dict(zip(("dq", "dk", "dv"), gradients, strict=True)), {name: plain[name] for name in ("dq", "dk", "dv")})


def test_mixed_dtypes_meet_in_autocast(device):
    q, k, v = torch.randn(3, 2, 5, 16, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert attention(q, k.half(), v.bfloat16()).dtype == torch.bfloat16


def test_autocast_leaves_float64_alone(device):
    q, k, v = torch.randn(3, 2, 5, 16, dtype=torch.float64, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(attention(q, k, v, impl="tiled"), attention(q, k, v, impl="tiled"))
        assert attention(q, k, v).dtype == torch.float64


def test_explain_knows_of_autocast(device):
    q, k, v = torch.randn(3, 2, 5, 16, dtype=torch.float32, device=device)
    with torch.autocast(device.type, torch.float16), pytest.raises(TypeError, match=r"got torch\.float64"):
        explain(q, k, v.double())
    with torch.autocast(device.type, torch.float16):
        assert explain(q, k.half(), v).choice in Implementation


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("impl", ["flash", "tiled", "auto"])
def test_activation_checkpointing_changes_nothing(impl, device, use_reentrant):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=device)
    attend = partial(attention, causal=True, impl=impl)
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    out.backward(inputs.dout)  # torch.autograd.grad is not for reentrant checkpoints
    same({"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}, evaluate(attend, inputs))


def test_selective_checkpointing_can_keep_the_result(flash_device):
    """The operator has a name that a policy can ask for, so that it alone is not computed again."""
    forwards = []

    def policy(ctx, operator, *args, **kwargs):
        name = str(operator)
        if "flash_forward" in name and not ctx.is_recompute:
            forwards.append(name)
        return CheckpointPolicy.MUST_SAVE if "flash_forward" in name else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = make_inputs(SHAPES, dtype=torch.float16, device=flash_device)
    attend = partial(attention, causal=True, impl="flash")
    contexts = partial(create_selective_checkpoint_contexts, policy)
    results = evaluate(
        lambda q, k, v: checkpoint(attend, q * 1, k, v, use_reentrant=False, context_fn=contexts), inputs
    )
    same(results, evaluate(attend, inputs))
    assert len(forwards) == 1


MODULES = {
    "flash": FlashAttention,
    "tiled": TiledAttention,
    "naive": NaiveAttention,
    "sdpa": SDPAAttention,
    "compiled": CompiledAttention,
}


@pytest.mark.parametrize("impl", [name for name in MODULES if name != "compiled"])
def test_a_module_is_attention_with_its_settings(impl, device):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=device)
    settings = {"causal": "top_left", "scale": 0.3}
    expected = evaluate(partial(attention, impl=impl, **settings), inputs)
    same(evaluate(MODULES[impl](**settings), inputs), expected, exactly=impl != "sdpa")
    same(evaluate(Attention(impl=impl, **settings), inputs), expected, exactly=impl != "sdpa")


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_a_module_returns_the_log_sum_exp_when_asked(impl, device):
    inputs = make_inputs(SHAPES, dtype=torch.float16, device=device)
    module = Attention(impl=impl)
    same(
        evaluate(partial(module, return_lse=True), inputs),
        evaluate(partial(attention, impl=impl, return_lse=True), inputs),
    )


@pytest.mark.parametrize("impl", MODULES)
def test_modules_have_settings_and_no_state(impl):
    module = MODULES[impl](causal=True, scale=0.5)
    assert isinstance(module, Attention)
    assert list(module.parameters()) == []
    assert module.state_dict() == {}
    assert repr(module) == f"{MODULES[impl].__name__}(causal=True, scale=0.5, impl='{impl}')"
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module)


def test_the_general_module_chooses():
    assert repr(Attention()) == "Attention(causal=False, scale=None, impl='auto')"
    assert repr(Attention(window=(3, None), softcap=5.0, dropout_p=0.5)) == (
        "Attention(causal=False, scale=None, impl='auto', window=(3, None), softcap=5.0, dropout_p=0.5)"
    )
    assert repr(Attention(impl=Implementation.TILED)) == "Attention(causal=False, scale=None, impl='tiled')"


@pytest.mark.parametrize("kind", [Attention, NaiveAttention, TiledAttention])
def test_a_module_hands_features_on(kind):
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    tensors = {"bias": torch.randn(4, 9, 9), "sinks": torch.randn(4), "mask": torch.rand(9, 9) < 0.8}
    settings = {"causal": True, "window": (5, None), "softcap": 3.0, "scale": 0.5}
    expected = attention(q, k, v, impl="naive", return_lse=True, **settings, **tensors)
    torch.testing.assert_close(kind(**settings)(q, k, v, return_lse=True, **tensors), expected)


def test_a_module_drops_weights_in_training_alone():
    q = torch.randn(2, 4, 9, 8)
    module = NaiveAttention(dropout_p=0.5)
    expected = attention(q, q, q, impl="naive", dropout_p=0.5, seed=3)
    torch.testing.assert_close(module(q, q, q, seed=3), expected)
    torch.testing.assert_close(module.eval()(q, q, q, seed=3), attention(q, q, q, impl="naive"))


@pytest.mark.parametrize("wrong", [{"window": 3}, {"softcap": -1.0}, {"dropout_p": 2.0}])
def test_a_module_is_not_made_with_wrong_settings(wrong):
    [name] = wrong
    with pytest.raises((TypeError, ValueError), match=name):
        Attention(**wrong)
