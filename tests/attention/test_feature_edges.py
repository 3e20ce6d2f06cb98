"""Where features meet what is empty, hidden or infinite, any number of axes, and tensors arranged in any way."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.rules import Scores
from cs336_systems.attention.variants import relative_bias
from cs336_systems.testing import Shapes, evaluate, make_inputs

from .helpers import FLOAT, HALF, check, each_dtype, named, sizes_of, slow

SHAPES = Shapes.of(2, q_len=9, k_len=11, d=8, q_heads=2, kv_heads=1)
every_implementation = each_dtype(flash=(HALF, FLOAT), tiled=(FLOAT,))


def parameter(*shape):
    return torch.randn(shape).requires_grad_()


def sinks(*values):
    return torch.tensor(values).requires_grad_()


def hiding_bias():
    """Of the first head some rows, of the second a column, and the last row for both."""
    bias = torch.randn(1, 2, 9, 11)
    bias[0, 0, 3:5] = bias[0, 1, :, 4] = bias[0, :, 8] = -math.inf
    return bias.requires_grad_()


def on(device, features):
    """The features' tensors on a device, with the same strides."""
    moved: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, Scores):
            moved[name] = replace(value, tensors=tuple(on(device, dict(enumerate(value.tensors))).values()))
        elif isinstance(value, torch.Tensor):
            size = value.untyped_storage().nbytes() // value.element_size()
            memory = value.detach().as_strided((size,), (1,), 0).to(device)
            place = memory.as_strided(value.shape, value.stride(), value.storage_offset())
            moved[name] = place.requires_grad_(value.requires_grad)
        else:
            moved[name] = value
    return moved


def held(impl, dtype, device, shapes, features, **settings):
    """Results of a call within the budget."""
    return check(impl, make_inputs(shapes, dtype=dtype, device=device), on(device, features), **settings)


HIDDEN = {
    "bias": lambda: {"bias": hiding_bias()},
    "bias_sinks": lambda: {"bias": hiding_bias(), "sinks": parameter(2)},
    "bias_cap_dropout": lambda: {"bias": hiding_bias(), "softcap": 2.0, "dropout_p": 0.5, "seed": 3},
    "mask": lambda: {"mask": torch.arange(9)[:, None] % 3 > 0},
    "mask_sinks": lambda: {"mask": torch.arange(9)[:, None] % 3 > 0, "sinks": parameter(2)},
    "mask_of_everything": lambda: {"mask": torch.zeros(1, dtype=torch.bool), "alibi_slopes": parameter(2)},
    "sinks_of_minus_infinity": lambda: {"sinks": sinks(-math.inf, 1.0)},
    "sinks_of_minus_infinity_alone": lambda: {
        "sinks": sinks(-math.inf, 1.0),
        "mask": torch.zeros(9, 11, dtype=torch.bool),
    },
    "sinks_beyond_all_scores": lambda: {"sinks": sinks(300.0, -300.0)},
}


@pytest.mark.parametrize("name", named(HIDDEN, ["bias_sinks", "mask", "sinks_of_minus_infinity"]))
@every_implementation
def test_rows_that_see_little_or_nothing(impl, dtype, device, name):
    held(impl, dtype, device, SHAPES, HIDDEN[name]())


@every_implementation
def test_a_row_that_sees_nothing_is_0_and_its_log_sum_exp_minus_infinity_or_its_sink(impl, dtype, device):
    results = held(impl, dtype, device, SHAPES, {"bias": hiding_bias()})
    for name in ("out", "dq", "dbias"):
        assert not results[name][:, :, 8].any()
    assert (results["lse"][:, :, 8] == -math.inf).all()
    features = {"sinks": sinks(0.5, -2.0), "mask": torch.zeros(9, 11, dtype=torch.bool)}
    results = held(impl, dtype, device, SHAPES, features)
    assert not results["out"].any()
    # Naive rounds sinks to its dtype, as it does all scores; 0.5 and -2 are exact.
    expected = torch.tensor([0.5, -2.0], device=device)[:, None].expand(2, 2, 9)
    torch.testing.assert_close(results["lse"], expected)


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        ("top_left", (2, 3)),
        (False, (0, 0)),
        *[pytest.param(*x, marks=slow) for x in ((True, (3, 5)), (False, (99, 99)))],
    ],
)
@pytest.mark.parametrize(("lengths", "with_sinks"), [((40, 5), True), ((40, 5), False), ((5, 40), True)])
@each_dtype(flash=(HALF,), tiled=(FLOAT,))
def test_windows_past_the_ends(impl, dtype, device, lengths, with_sinks, causal, window):
    features = {"window": window} | ({"sinks": parameter(1)} if with_sinks else {})
    held(impl, dtype, device, Shapes.of(1, q_len=lengths[0], k_len=lengths[1], d=8), features, causal=causal)


def everything(shapes):
    """Every feature at once, for any number of axes."""
    batch, heads, q_len, k_len = sizes_of(shapes)
    distances = parameter(batch, heads, max(1, q_len + k_len - 1))
    return {
        "bias": parameter(*shapes.q[:-2], q_len, k_len),
        "alibi_slopes": parameter(heads),
        "scores": relative_bias(distances, q_len - (1 if q_len or k_len else 0)),
        "sinks": parameter(heads),
        "mask": torch.rand(q_len, k_len) < 0.6,
    } | {"softcap": 3.0, "window": (3, 2), "dropout_p": 0.3, "seed": 1}


SIZE = {"q_len": 5, "k_len": 6, "d": 8}
AXES = {
    "none": Shapes.of(**SIZE),
    "batch": Shapes.of(3, **SIZE),
    "two_batch_axes": Shapes.of(2, 3, **SIZE, q_heads=2, kv_heads=1),
    "no_queries": Shapes.of(2, **SIZE | {"q_len": 0}, q_heads=2),
    "no_keys": Shapes.of(2, **SIZE | {"k_len": 0}, q_heads=2),
    "neither": Shapes.of(1, **SIZE | {"q_len": 0, "k_len": 0}, q_heads=2),
    "no_batch": Shapes.of(0, **SIZE, q_heads=2),
    "no_heads": Shapes.of(2, **SIZE, q_heads=0),
    "batch_no_queries": Shapes.of(3, **SIZE | {"q_len": 0}),
    "batch_no_keys": Shapes.of(3, **SIZE | {"k_len": 0}),
}


@pytest.mark.parametrize("name", named(AXES, ["none", "two_batch_axes", "no_keys", "batch_no_queries"]))
@every_implementation
def test_every_feature_with_any_axes(impl, dtype, device, name):
    """And scales of any sign, which come before rules."""
    settings = {"causal": "top_left" if "no_" in name else False}
    settings |= {"none": {"scale": -0.5}, "batch": {"scale": 0.0}}.get(name, {})
    held(impl, dtype, device, AXES[name], everything(AXES[name]), **settings)


FIVE = AXES["two_batch_axes"]
ARRANGED = {
    "transposed": (SHAPES, {"bias": torch.randn(2, 2, 11, 9).mT, "mask": (torch.rand(2, 2, 11, 9) < 0.5).mT}),
    "expanded": (
        SHAPES,
        {
            "bias": torch.randn(2, 1, 9, 1).expand(2, 2, 9, 11),
            "mask": (torch.rand(2, 1, 1, 11) < 0.5).expand(2, 2, 9, 11),
        },
    ),
    "spaced": (
        SHAPES,
        {"bias": torch.randn(9, 22)[:, ::2], "alibi_slopes": torch.rand(4)[::2], "sinks": torch.rand(4)[::2]},
    ),
    "last_axes_alone": (SHAPES, {"bias": torch.randn(11), "mask": torch.rand(9, 1) < 0.6}),
    "slopes_of_each_entry": (SHAPES, {"alibi_slopes": torch.rand(2, 2).mT}),
    "first_batch_axis": (FIVE, {"bias": torch.randn(2, 1, 2, 5, 6), "mask": torch.rand(2, 1, 1, 5, 6) < 0.6}),
    "second_batch_axis": (FIVE, {"bias": torch.randn(3, 2, 5, 1), "mask": torch.rand(3, 1, 1, 6) < 0.6}),
    "slopes_of_two_axes": (FIVE, {"alibi_slopes": torch.rand(6, 2)}),
    "expanded_over_batch_axes": (FIVE, {"bias": torch.randn(1, 1, 1, 5, 6).expand(2, 3, 2, 5, 6)}),
    "no_head_axis": (AXES["batch"], {"bias": torch.randn(3, 1, 6), "mask": torch.rand(1, 5, 6) < 0.6}),
}


@pytest.mark.parametrize("name", named(ARRANGED, ["transposed", "spaced", "first_batch_axis", "no_head_axis"]))
@each_dtype(flash=(HALF,), tiled=(FLOAT,))
def test_tensors_in_any_arrangement(impl, dtype, device, name):
    shapes, features = ARRANGED[name]
    differentiated = {key: x.detach().requires_grad_(x.is_floating_point()) for key, x in features.items()}
    held(impl, dtype, device, shapes, differentiated, causal="top_left")


@pytest.mark.parametrize("own", [HALF, pytest.param(FLOAT, marks=slow), torch.float64])
@every_implementation
def test_parameters_may_have_a_dtype_of_their_own(impl, dtype, device, own):
    parameters = {"bias": torch.randn(2, 9, 11), "alibi_slopes": torch.rand(2), "sinks": torch.randn(2)}
    features: dict[str, Any] = {name: x.to(own).requires_grad_() for name, x in parameters.items()}
    features["scores"] = relative_bias(torch.randn(19, 4, dtype=own).T[::2].requires_grad_(), 8)  # with strides
    results = held(impl, dtype, device, SHAPES, features)
    assert {results[name].dtype for name in ("dbias", "dalibi_slopes", "dsinks", "dscores_0")} == {own}


@every_implementation
def test_one_tensor_may_be_several_arguments(impl, dtype, device):
    shared = torch.rand(2, device=device, dtype=dtype).requires_grad_()
    q, k, v, dout, _ = make_inputs(SHAPES, dtype=dtype, device=device)
    gradients = []
    for alibi_slopes, own_sinks in ((shared, shared), (shared, shared.clone())):
        out = attention(q, k, v, alibi_slopes=alibi_slopes, sinks=own_sinks, impl=impl)
        gradients += torch.autograd.grad(out, shared, dout)
    torch.testing.assert_close(*gradients)


@every_implementation
def test_without_gradients_results_are_the_same(impl, dtype, device):
    inputs, features = make_inputs(SHAPES, dtype=dtype, device=device), on(device, everything(SHAPES))
    attend = partial(attention, impl=impl, return_lse=True)
    results = evaluate(attend, inputs, features)
    with torch.no_grad():
        out, lse = attend(*inputs[:3], **features)
    assert torch.equal(out, results["out"])
    assert torch.equal(lse, results["lse"])
