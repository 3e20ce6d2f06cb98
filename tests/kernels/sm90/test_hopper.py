"""The kernels for Hopper, on one: values and gradients against float64, overflow, equal bits."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.kernels.call import NO_AUX, Call
from cs336_systems.kernels.sm90 import backend
from cs336_systems.kernels.sm90.tiles import HEAD_DIMS
from cs336_systems.kernels.triton import backend as portable
from cs336_systems.testing import (
    Shapes,
    make_inputs,
    naive_results,
    oracle,
    terms,
)
from cs336_systems.testing.budget import compare

from .hopper import BANDS, compute, on_hopper, options_of, oracle_settings

pytestmark = on_hopper

SHAPES = {
    "square": Shapes((2, 4, 512, 0), (2, 4, 512, 0), (2, 4, 512, 0)),
    "grouped": Shapes((1, 6, 300, 0), (1, 2, 300, 0), (1, 2, 300, 0)),
    "more_keys": Shapes((1, 2, 129, 0), (1, 1, 777, 0), (1, 1, 777, 0)),
    "more_queries": Shapes((1, 2, 700, 0), (1, 2, 130, 0), (1, 2, 130, 0)),
    "one_query": Shapes((3, 2, 1, 0), (3, 2, 65, 0), (3, 2, 65, 0)),
    "many_tiles": Shapes((2, 40, 1000, 0), (2, 8, 1000, 0), (2, 8, 1000, 0)),
    "many_rows": Shapes((1, 2, 4200, 0), (1, 1, 400, 0), (1, 1, 400, 0)),
}

dims = pytest.mark.parametrize("d", [*HEAD_DIMS, 80, 400])
dense_bands = pytest.mark.parametrize("band", ["none", "causal", "window"])


def inputs_of(shape, d, dtype=torch.bfloat16, layout="contiguous", dv=None):
    shapes = Shapes(*[(*x[:-1], columns) for x, columns in zip(SHAPES[shape], (d, d, dv or d), strict=True)])
    return make_inputs(shapes, dtype=dtype, device="cuda", layout=layout)


def results(inputs, *, calls=2, deterministic=False, **arguments):
    return compute(inputs, options_of(inputs.q.shape[-1], deterministic=deterministic, **arguments), calls=calls)


def assert_right(actual, inputs, **arguments):
    settings = oracle_settings(**arguments)
    expected = [make(inputs, **settings) for make in (oracle, naive_results, terms)]
    findings = compare(actual, *[{name: result[name] for name in actual} for result in expected])
    beyond = [finding for finding in findings if not finding.holds]
    assert not beyond, "\n".join(map(str, beyond))


def check(inputs, **arguments):
    actual = results(inputs, **arguments)
    assert_right(actual, inputs, **arguments)
    return actual


@dense_bands
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "many_rows"])
@pytest.mark.parametrize("d", [*HEAD_DIMS, 24, 40, 80, 96, 136, 192, 200, 264, 400, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_results_are_within_the_budget(dtype, d, shape, band):
    check(inputs_of(shape, d, dtype), **BANDS[band])


@dense_bands
@pytest.mark.parametrize("shape", ["grouped", "more_keys", "many_tiles"])
@pytest.mark.parametrize("d", [8, 16])
def test_the_backward_takes_narrower_heads_than_the_forward(d, shape, band):
    inputs = inputs_of(shape, d)
    q, k, v, dout, dlse = inputs
    call = Call(q, k, v, options_of(d, **BANDS[band]), NO_AUX)
    assert (backend.supports(call) is None, backend.supports_backward(call, call.wanted)) == (False, None)
    out, lse = portable.plan_forward(call)(q, k, v, NO_AUX)
    gradients = backend.plan_backward(call, out, dout, True, call.wanted)(q, k, v, out, lse, dout, dlse, NO_AUX)
    actual = {"out": out, "lse": lse, "dq": gradients.q, "dk": gradients.k, "dv": gradients.v}
    assert_right(actual, inputs, **BANDS[band])


@pytest.mark.parametrize("d", [*HEAD_DIMS, 512])
@pytest.mark.parametrize("band", ["causal", "window"])
def test_rows_may_be_many(d, band):
    check(inputs_of("many_rows", d), **BANDS[band])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("cap", [None, 20.0])
@dense_bands
def test_v_may_be_narrower_with_a_soft_cap_or_float16(band, cap, dtype):
    inputs = inputs_of("grouped", 192, dtype, dv=128)
    inputs.q.mul_(4.0)
    check(inputs, **BANDS[band], softcap=cap)


@pytest.mark.parametrize("cap", [0.5, 20.0])
@dense_bands
@pytest.mark.parametrize("d", [*HEAD_DIMS, 96])
def test_softcap(d, band, cap):
    inputs = inputs_of("grouped", d)
    inputs.q.mul_(4.0)
    check(inputs, **BANDS[band], softcap=cap)


@dense_bands
@pytest.mark.parametrize("shape", ["square", "grouped", "more_keys", "more_queries", "one_query", "many_tiles"])
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (136, 72), (160, 128), (80, 64), (320, 64), (512, 400)])
def test_v_may_be_narrower(d, dv, shape, band):
    check(inputs_of(shape, d, dv=dv), **BANDS[band])


@pytest.mark.parametrize("layout", ["length_before_heads", "packed"])
@pytest.mark.parametrize("d", [*HEAD_DIMS, 400])
def test_layouts(d, layout):
    inputs = inputs_of("square", d, layout=layout)
    out = check(inputs, causal="bottom_right")["out"]
    if layout == "length_before_heads":
        assert out.stride() == inputs.q.stride()


@pytest.mark.parametrize("band", ["none", "causal"])
@pytest.mark.parametrize("d", [*HEAD_DIMS, 80, 512])
def test_tiles_that_overflow_are_computed_again(d, band):
    inputs = inputs_of("many_tiles", d)
    q, k = inputs.q, inputs.k
    # An early key far above all that are visited before: for one head's queries, and for some rows of another's.
    q[:, 1, :, 0], k[:, 0, 3, 0] = 20.0, 400.0
    q[:, 17, 600:700, 1], k[:, 3, 10, 1] = 30.0, 300.0
    check(inputs, **BANDS[band])


@pytest.mark.parametrize("band", ["none", "causal"])
def test_every_tile_may_overflow(band):
    """Each CTA's retry list is as long as all that it computed."""
    inputs = inputs_of("many_tiles", 64)
    inputs.q[..., 0], inputs.k[..., 3, 0] = 20.0, 400.0
    check(inputs, **BANDS[band])


def test_nan_stays_in_its_head():
    inputs = inputs_of("many_tiles", 128)
    inputs.k[1, 3, 5, 7] = math.nan
    out = results(inputs)["out"]
    is_spoilt = torch.zeros(2, 40, dtype=torch.bool, device="cuda")
    is_spoilt[1, 15:20] = True
    assert out[is_spoilt].isnan().all()
    assert out[~is_spoilt].isfinite().all()


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_values_are_the_same_every_time(d):
    inputs = inputs_of("many_tiles", d)
    first = results(inputs, causal="bottom_right")
    for _ in range(20):
        again = results(inputs, causal="bottom_right")
        assert all(torch.equal(first[name], again[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("band", ["none", "causal", "window", "window_alone"])
@pytest.mark.parametrize("shape", ["square", "grouped", "more_keys", "more_queries", "one_query", "many_tiles"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (80, 80), (128, 128), (192, 128)])
def test_deterministic_gradients_are_the_same_every_time(d, dv, shape, band):
    inputs = inputs_of(shape, d, dv=dv)
    first = results(inputs, deterministic=True, **BANDS[band])
    assert_right(first, inputs, **BANDS[band])
    for calls in range(1, 11):
        again = results(inputs, deterministic=True, calls=calls, **BANDS[band])
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_captured_graph_can_be_replayed():
    """Also where tiles overflow."""
    inputs = inputs_of("many_tiles", 128)
    q, k, v = inputs[:3]
    q[:, 1, :, 0], k[:, 0, 3, 0] = 20.0, 400.0
    forward = backend.plan_forward(Call(q, k, v, options_of(128, causal="bottom_right")))
    expected, _ = forward(q, k, v, NO_AUX)
    forward(q, k, v, NO_AUX)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = forward(q, k, v, NO_AUX)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
