"""torch.compile: one graph, forward and backward, for fixed and for dynamic sizes, with and without features."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from cs336_systems.attention import Attention, attention, attention_varlen
from cs336_systems.attention.variants import document, prefix, relative_bias
from cs336_systems.attention.variants import window as window_rule
from cs336_systems.testing import Shapes, assert_within_budget, evaluate, make_inputs, make_packed

from .features import Maker, bent, clipped
from .helpers import (
    COMPILES,
    EVERY,
    FLOAT,
    HALF,
    assert_same,
    compiled_once,
    named,
    one_graph,
    packed_arguments,
    slow,
)

SHAPES = Shapes.of(2, q_len=5, k_len=9, d=16, dv=8, q_heads=4, kv_heads=2)
pytestmark = COMPILES


def parameters(names, device, batch=2, q_len=5, k_len=9):
    """Tensors for features, as arguments of what is compiled."""
    return Maker((batch, 4, q_len, k_len), FLOAT, device).tensors(*names)


EVERYTHING = ("bias", "alibi_slopes", "sinks", "mask")
SETTINGS = {"window": (6, 2), "softcap": 1.5, "dropout_p": 0.3, "seed": 7}
CALLS = {
    "causal": ((), {"causal": True}),
    "log_sum_exp": ((), {"causal": True, "return_lse": True}),
    "scaled": ((), {"causal": "top_left", "scale": -0.5}),
    "cap_and_slopes": (("alibi_slopes",), {"softcap": 1.5, "causal": True, "return_lse": True}),
    "bias_and_mask": (("bias", "mask"), {"return_lse": True}),
    "everything": (EVERYTHING, SETTINGS | {"return_lse": True}),
}
ONE_GRAPH = [
    *[("flash", name) for name in CALLS],
    *[(impl, name) for impl in ("tiled", "naive") for name in ("log_sum_exp", "everything")],
    # What "auto" chooses on a CPU is torch's own, and with the log-sum-exp tiled.
    *[("auto", name) for name in ("causal", "scaled", "log_sum_exp")],
]
FAST = [("flash", "cap_and_slopes"), ("tiled", "everything"), ("auto", "causal")]


@pytest.mark.parametrize(
    ("impl", "name"), [pytest.param(*call, marks=[slow] * (call not in FAST)) for call in ONE_GRAPH]
)
def test_one_graph_computes_what_eager_does(impl, device, name):
    """Also where some queries see no key."""
    names, settings = CALLS[name]
    attend = partial(attention, impl=impl, **settings)
    dtype = HALF if impl != "naive" and not names else FLOAT
    shapes = SHAPES._replace(k=(2, 2, 3, 16), v=(2, 2, 3, 8)) if name == "log_sum_exp" else SHAPES
    inputs, features = make_inputs(shapes, dtype=dtype, device=device), parameters(names, device)
    assert_same(evaluate(one_graph(attend), inputs, features), evaluate(attend, inputs, features))


GENERATED = [
    *[(impl, {"causal": True, "return_lse": True}, (9,)) for impl in ("flash", "tiled", "compiled")],
    # Its random numbers are computed once, and not again for each weight that they are part of.
    *[(impl, {"dropout_p": 0.3, "seed": 7}, (32,)) for impl in ("naive", "tiled", "auto")],
    # Tiled's loops over tiles are no part of the graph, so one serves all lengths from the third on.
    ("tiled", {"window": (5, 0), "return_lse": True}, (33, 47, 60)),
]


@slow
@pytest.mark.parametrize(("impl", "settings", "lengths"), GENERATED)
def test_code_generated_from_the_graph(impl, settings, lengths, device):
    """Other backends than the default one do not see what code generation takes."""
    attend = partial(attention, impl=impl, **settings)
    run = attend if impl == "compiled" else one_graph(attend, backend="inductor")  # which compiles itself
    features = {name: value for name, value in settings.items() if name not in ("causal", "return_lse")}
    for number, length in enumerate(lengths):
        inputs = make_inputs(Shapes.of(1, q_len=length, d=16, q_heads=2), device=device)
        with compiled_once(number == 2):
            results = evaluate(run, inputs)
        assert_within_budget(results, inputs, causal=settings.get("causal", False), features=features)


DYNAMIC = {
    "flash": ("flash", (), {"return_lse": True}),
    "tiled": ("tiled", (), {"return_lse": True}),
    "naive": ("naive", (), {"return_lse": True}),
    "auto": ("auto", (), {}),
    "flash-features": ("flash", EVERYTHING, {"return_lse": True, "softcap": 2.0}),
    "flash-window": ("flash", EVERYTHING, {"return_lse": True, "softcap": 2.0, "window": (6, None)}),
}


@pytest.mark.parametrize("name", named(DYNAMIC, ["tiled"]))
def test_one_graph_for_all_sizes(device, name):
    """Batch, heads and lengths vary and nothing is compiled again; also with the last query at the last key."""
    impl, names, settings = DYNAMIC[name]
    attend = one_graph(partial(attention, causal=True, impl=impl, **settings), dynamic=True)
    # No two sizes are equal: torch takes sizes that are for one and the same.
    sizes = ((3, 2, 5, 10), (5, 2 if names else 3, 8, 24))
    for number, (batch, kv_heads, q_len, k_len) in enumerate(sizes):
        shapes = Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, q_heads=2 * kv_heads, kv_heads=kv_heads)
        inputs = make_inputs(shapes, dtype=FLOAT if impl == "naive" or names else HALF, device=device)
        tensors = parameters(names, device, batch, q_len, k_len)
        with compiled_once(number):
            results = evaluate(attend, inputs, tensors)
        features = tensors | {key: value for key, value in settings.items() if key != "return_lse"}
        assert_within_budget(results, inputs, causal=True, features=features)


@slow
def test_a_length_marked_as_dynamic(flash_device):
    attend = one_graph(partial(attention, causal=True, impl="flash"))
    for number, length in enumerate((6, 17)):
        inputs = make_inputs(Shapes.of(2, q_len=length, d=16), device=flash_device)
        for x in inputs[:3]:
            torch._dynamo.mark_dynamic(x.requires_grad_(), 1)
        with compiled_once(number):
            out = attend(*inputs[:3])
        gradients = torch.autograd.grad(out, inputs[:3], inputs.dout)
        results = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
        assert_within_budget(results, inputs, causal=True)


@slow
@pytest.mark.parametrize("impl", EVERY)
def test_packed_sequences(impl, device):
    dynamic = None if impl == "tiled" else True
    attend = partial(attention_varlen, causal=True, impl=impl, return_lse=True)
    compiled = one_graph(attend, dynamic=dynamic)
    for number, lengths in enumerate(([(3, 5), (6, 8)], [(8, 11), (22, 30)], [(7, 9), (7, 3), (9, 50)])):
        inputs = make_packed(lengths, heads=(4, 2), d=16, device=device)
        made = packed_arguments(lengths, device)
        given = {name: made[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
        features = parameters(("alibi_slopes", "sinks"), device)
        with compiled_once(number if dynamic else 0):
            results = evaluate(partial(compiled, **given), inputs, features)
        assert_same(results, evaluate(partial(attend, **given), inputs, features))


@pytest.mark.parametrize("impl", named(["flash", "auto"], ["auto"]))
def test_a_module_in_a_compiled_model(impl, device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)
            self.attend = Attention(causal=True, impl=impl)

        def forward(self, x):
            q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            return self.attend(q, k, v).transpose(1, 2).flatten(2)

    model, x = Model().to(device), torch.randn(2, 7, 16, device=device)
    (eager,) = torch.autograd.grad(model(x).square().sum(), model.project.weight)
    (gradient,) = torch.autograd.grad(one_graph(model)(x).square().sum(), model.project.weight)
    torch.testing.assert_close(gradient, eager)


def by_rules(q, k, v, impl, rates, offsets, ids, lengths, before):
    """Rules made of tensors and numbers; ~ by a name, as torch.compile traces no ~ of a class."""
    changed = bent(rates, offsets) + bent(rates, offsets)
    mask = document(ids[:, : q.shape[-2]], ids) | (prefix(lengths) & window_rule(before, 1)).inverted()
    return attention(q, k, v, mask=mask, scores=changed, impl=impl, return_lse=True)


def by_distance(q, k, v, impl, weights):
    """A bias made of buckets."""
    distances = torch.arange(1 - q.shape[-2], k.shape[-2], device=q.device)
    scores = relative_bias(weights[:, distances.clamp(-3, 3) + 3], q.shape[-2] - 1)
    return attention(q, k, v, causal=True, scores=scores, impl=impl, return_lse=True)


def without_derivatives(q, k, v, impl, weights):
    return attention(q, k, v, scores=clipped(weights, 3), impl=impl, return_lse=True)


MADE_INSIDE = [
    *[(by_rules, impl, None) for impl in ("tiled", "flash", "naive")],
    *[(by_distance, impl, None) for impl in ("tiled", "flash", "naive")],
    (by_distance, "flash", True),  # one graph serves all lengths
    *[(without_derivatives, impl, None) for impl in ("tiled", "naive")],
]


@pytest.mark.parametrize(
    ("attend", "impl", "dynamic"), [pytest.param(*row, marks=[slow] * (row[1] != "tiled")) for row in MADE_INSIDE]
)
def test_rules_made_in_a_graph(attend, impl, dynamic, device):
    weights = torch.randn(4, 7, device=device).requires_grad_()
    features: dict[str, Any] = {"weights": weights}
    if attend is by_rules:
        rates, offsets = (torch.rand(*shape, device=device).requires_grad_() for shape in ((4, 5), (2, 9)))
        ids = torch.tensor([[0] * 4 + [1] * 5, [2] * 9], device=device)
        lengths = torch.tensor([3, 0], device=device)
        features = {"rates": rates, "offsets": offsets, "ids": ids, "lengths": lengths, "before": 2}
    run, eager = one_graph(partial(attend, impl=impl), dynamic=dynamic), partial(attend, impl=impl)
    for number, (batch, q_len, k_len) in enumerate(((3, 5, 10), (5, 8, 24)) if dynamic else ((2, 5, 9),)):
        inputs = make_inputs(Shapes.of(batch, q_len=q_len, k_len=k_len, d=16, q_heads=4, kv_heads=2), device=device)
        with compiled_once(number):
            results = evaluate(run, inputs, features)
        assert_same(results, evaluate(eager, inputs, features))


@slow
def test_the_compiled_implementation_takes_features(device):
    inputs, features = make_inputs(SHAPES, device=device), parameters(EVERYTHING, device) | SETTINGS
    results = evaluate(partial(attention, impl="compiled", return_lse=True), inputs, features)
    assert_within_budget(results, inputs, features=features)


@slow
def test_the_compiled_implementation_outlasts_the_limit_on_recompiling(device):
    """It is one function, which torch compiles anew for each combination of settings, up to a limit."""
    with torch._dynamo.config.patch(recompile_limit=1):
        for d, causal in ((4, False), (8, "top_left")):
            q = torch.randn(1, 3, d, device=device)
            expected = attention(q, q, q, causal=causal, impl="naive")
            torch.testing.assert_close(attention(q, q, q, causal=causal, impl="compiled"), expected)


@slow
def test_a_graph_draws_anew_in_each_call(flash_device):
    q = torch.randn(1, 2, 9, 16, device=flash_device)
    attend = one_graph(partial(attention, dropout_p=0.5, impl="flash"))
    assert not torch.equal(attend(q, q, q), attend(q, q, q))


@pytest.mark.parametrize("strided", named(["expanded", "transposed"], []))
def test_gradients_of_a_bias_with_any_strides(flash_device, strided):
    inputs = make_inputs(SHAPES, dtype=HALF, device=flash_device)
    bias = torch.randn(1, 4, 5, 1).expand(2, 4, 5, 9) if strided == "expanded" else torch.randn(2, 4, 9, 5).mT
    features = {"bias": bias.to(flash_device).detach().requires_grad_()}
    attend = partial(attention, impl="flash", return_lse=True)
    assert_same(evaluate(one_graph(attend), inputs, features), evaluate(attend, inputs, features))
