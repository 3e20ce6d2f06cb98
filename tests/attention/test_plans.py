"""Plans: made once for all that a call depends on, and run with the tensors of each call."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import api, attention, attention_varlen, attention_with_cache, dispatch, plan
from cs336_systems.attention.variants import block_local, document, relative_bias, window
from cs336_systems.testing import Shapes, make_cache, make_inputs, make_packed, starts_of

from .features import stretched
from .helpers import DOUBLE, HALF, each_implementation, named


@pytest.fixture
def planned(no_plans, monkeypatch):
    """The calls that were planned, rather than found, in order."""
    calls: list[object] = []
    make_call = api.make_call

    def recorded(*arguments):
        calls.append(arguments)
        return make_call(*arguments)

    monkeypatch.setattr(api, "make_call", recorded)
    return calls


def made(**shape):
    """q, k and v by name."""
    sizes = {"q_len": 6, "k_len": 6, "d": 16, "q_heads": 4, "kv_heads": 2} | shape
    inputs = make_inputs(Shapes.of(2, **sizes), dtype=DOUBLE)
    return dict(zip("qkv", inputs[:3], strict=True))


def ones(*shape):
    return torch.ones(shape, dtype=DOUBLE)


BIAS, SEEN = torch.randn(4, 6, 6, dtype=DOUBLE), torch.rand(6, 6) < 0.7
CHANGES = {
    "lengths": {"q_len": 5},
    "keys": {"k_len": 7},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left", "k_len": 9},
    "bottom_right": {"causal": True, "k_len": 9},
    "window": {"window": (2, None)},
    "window_after": {"window": (None, 2)},
    "wider_window": {"window": (3, None)},
    "scale": {"scale": 0.1},
    "negative_scale": {"scale": -0.1},
    "softcap": {"softcap": 0.5},
    "lower_softcap": {"softcap": 0.25},
    "dropout": {"dropout_p": 0.5, "seed": 1},
    "more_dropout": {"dropout_p": 0.6, "seed": 1},
    "log_sum_exp": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "tiled": {"impl": "tiled"},
    "bias": {"bias": BIAS},
    "transposed_bias": {"bias": BIAS.mT},
    "bias_of_one_head": {"bias": BIAS[0]},
    "bias_of_float32": {"bias": BIAS.float()},
    "bias_with_gradient": {"bias": BIAS.clone().requires_grad_()},
    "mask": {"mask": SEEN},
    "mask_of_keys": {"mask": SEEN[0]},
    "transposed_mask": {"mask": SEEN.mT},
    "rules": {"mask": window(1, 1)},
    "other_rules": {"mask": window(1, 2)},
    "blocks": {"mask": block_local(4)},
    "lists_of_blocks": {"mask": block_local(4).with_blocks(6, 6)},
    "slopes": {"alibi_slopes": ones(4)},
    "slopes_of_entries": {"alibi_slopes": ones(2, 4)},
    "sinks": {"sinks": ones(4)},
    "scores": {"scores": relative_bias(ones(4, 11))},
    "origin": {"scores": relative_bias(ones(4, 12), 5)},
}
SIZES = ("q_len", "k_len")


def outputs(change):
    tensors = made(**{name: change[name] for name in SIZES if name in change})
    torch.manual_seed(3)
    tensors = {name: torch.randn_like(x) for name, x in tensors.items()}
    settings = {name: value for name, value in change.items() if name not in SIZES}
    out = attention(**tensors, **{"impl": "naive"} | settings)
    return out if isinstance(out, tuple) else (out,)


def test_calls_that_differ_in_one_argument_have_a_plan_each(planned):
    fresh = []
    for change in ({}, *CHANGES.values()):
        dispatch.clear_plans()
        fresh.append(outputs(change))
    dispatch.clear_plans()
    planned.clear()
    for _ in range(2):
        for change, expected in zip(({}, *CHANGES.values()), fresh, strict=True):
            for x, y in zip(outputs(change), expected, strict=True):
                assert torch.equal(x, y), change
    assert len(planned) == len(dispatch.plans) == 1 + len(CHANGES)


def misaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [torch.Tensor.half, lambda x: x.mT.contiguous().mT, misaligned, lambda x: torch.nn.Parameter(x).unsqueeze(0)],
    ids=["dtype", "strides", "alignment", "axes"],
)
@pytest.mark.parametrize("names", ["qkv", "v"])
def test_what_a_tensor_looks_like_is_part_of_the_key(planned, change, names):
    tensors = {name: x.float() for name, x in made().items()}
    changed = {name: change(x) if name in names else x for name, x in tensors.items()}
    expected = attention(**tensors, impl="naive")
    try:
        out = attention(**changed, impl="naive")
    except (TypeError, ValueError):
        assert names == "v"  # which then fits q and k no more
    else:
        torch.testing.assert_close(out.view_as(expected).float(), expected, rtol=2e-3, atol=2e-3)
    assert len(planned) == 2


def test_what_is_set_outside_of_a_call_is_part_of_the_key(planned):
    tensors = {name: x.float() for name, x in made().items()}
    call = partial(attention, **tensors, impl="naive")
    call()
    torch.set_float32_matmul_precision("high")
    call()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        call()
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(planned) == 4
    call()
    assert len(planned) == 4


BOUND = ["bias", "sinks", "seed", "blocks"]


def values(name, device, number):
    """An argument whose metadata is the same for each number."""
    torch.manual_seed(number)
    ids = torch.randint(0, 2, (2, 20), device=device).sort(-1).values
    return {
        "bias": lambda: {"bias": torch.randn(4, 20, 20, device=device)},
        "mask": lambda: {"mask": torch.rand(2, 1, 20, 20, device=device) < 0.6},
        "slopes": lambda: {"alibi_slopes": torch.rand(4, device=device)},
        "sinks": lambda: {"sinks": torch.randn(4, device=device)},
        "rules": lambda: {"mask": document(ids), "scores": stretched(torch.rand(1, 4, 1, 1, device=device))},
        "blocks": lambda: {"mask": document(ids).with_blocks(20, 20)},
        "seed": lambda: {"dropout_p": 0.5, "seed": number},
        "seed_tensor": lambda: {"dropout_p": 0.5, "seed": torch.tensor([number], device=device)},
        "generator": lambda: {"dropout_p": 0.5, "generator": torch.Generator().manual_seed(number)},
    }[name]()


@pytest.mark.parametrize(
    "name", named(["bias", "mask", "slopes", "sinks", "rules", "blocks", "seed", "seed_tensor", "generator"], BOUND)
)
@each_implementation
def test_a_plan_runs_with_the_tensors_of_each_call(planned, impl, device, name):
    inputs = make_inputs(Shapes.of(2, q_len=20, d=16, q_heads=4, kv_heads=2), device=device)
    results = []
    for number in (1, 2):
        out = attention(*inputs[:3], **values(name, device, number), impl=impl)
        assert len(planned) == 1
        results.append(out)
    for number, out in zip((1, 2), results, strict=True):
        dispatch.clear_plans()
        torch.testing.assert_close(out, attention(*inputs[:3], **values(name, device, number), impl="naive"))
    assert not torch.equal(*results)


@each_implementation
def test_gradients_reach_the_tensors_of_each_call(planned, impl, device):
    inputs = make_inputs(Shapes.of(1, q_len=20, d=16, q_heads=4, kv_heads=2), device=device)
    for number in (1, 2):
        torch.manual_seed(number)
        leaves = [torch.rand(*shape, device=device).requires_grad_() for shape in ((4,), (4,), (1, 4, 20, 20))]
        named = dict(zip(("sinks", "alibi_slopes", "bias"), leaves, strict=True))
        gradients, expected = (
            torch.autograd.grad(attention(*inputs[:3], **named, impl=each), leaves, inputs.dout)
            for each in (impl, "naive")
        )
        torch.testing.assert_close(gradients, expected)
    assert len(planned) == (1 if impl == "naive" else 2)


def test_a_number_that_cannot_be_is_refused_with_a_plan_too(planned):
    tensors = made()
    attention(**tensors, alibi_slopes=ones(4))
    with pytest.raises(ValueError, match=r"^alibi_slopes must be finite; got nan$"):
        attention(**tensors, alibi_slopes=ones(4) * torch.nan)
    assert len(planned) == 1


class Logged(torch.Tensor):
    """A subclass, which sees the operators that get it."""

    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_the_operators_with_a_plan_too(no_plans, flash_device):
    inputs = make_inputs(Shapes.of(2, q_len=20, d=16, q_heads=4), dtype=HALF, device=flash_device)
    bias = torch.randn(20, 20, device=flash_device)
    for kind in (torch.Tensor, Logged, torch.Tensor):
        Logged.seen.clear()
        attention(*inputs[:3], bias=bias.as_subclass(kind), impl="flash")
        assert any("flash_forward" in name for name in Logged.seen) == (kind is Logged)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_other_lengths_of_packed_sequences_need_no_plan(planned, causal):
    inputs = make_packed([(9, 9)], heads=(2, 2), d=16)
    asked = {"causal": causal, "alibi_slopes": torch.rand(2), "scores": stretched(torch.rand(1, 2, 1, 1))}
    for lengths in ([3, 6], [8, 1]):
        q, k, v = (x.split(lengths) for x in inputs[:3])
        k, v = ([x[:-1] for x in each] for each in (k, v))  # the lengths of q and of k differ
        starts = starts_of(lengths), starts_of([length - 1 for length in lengths])
        out = attention_varlen(inputs.q, torch.cat(k), torch.cat(v), *starts, **asked)
        alone = [
            attention(*[x[None].transpose(1, 2) for x in one], **asked, impl="naive")
            for one in zip(q, k, v, strict=True)
        ]
        torch.testing.assert_close(out, torch.cat([x[0].transpose(0, 1) for x in alone]))
    assert sum(call[4] is not None for call in planned) == 1


def test_other_lengths_of_a_cache_need_no_plan(planned):
    cache = make_cache([8, 8], capacity=8, q_heads=2, kv_heads=1, d=16)
    for lengths in ([8, 3], [1, 5]):
        out = attention_with_cache(*cache[:3], torch.tensor(lengths), impl="naive")
        for number, length in enumerate(lengths):
            one = slice(number, number + 1)
            slots = (x[one, :, :length] for x in cache[1:3])
            torch.testing.assert_close(out[one], attention(cache.q[one], *slots, causal=True, impl="tiled"))
    assert sum(call[5] is not None for call in planned) == 1


def test_no_more_plans_are_kept_than_allowed(planned, flash_device, monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    for length in range(1, 9):
        q = torch.randn(1, length, 16, device=flash_device)
        torch.testing.assert_close(attention(q, q, q, impl="flash"), attention(q, q, q, impl="naive"))
        assert len(dispatch.plans) <= 3
        assert len(dispatch._kernel_plans) <= 3
