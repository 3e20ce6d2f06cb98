"""The kernels for Hopper, on one: values and gradients against float64, weights that overflow, equal bits."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention.variants import softcap
from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.sm90.config import WIDTHS
from cs336_systems.kernels.sm90.coverage import why_not_backward
from cs336_systems.kernels.versions import why_not_gluon
from cs336_systems.testing import Shapes, make_inputs, naive_results, oracle, terms
from cs336_systems.testing.budget import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or why_not_gluon() is not None,
        reason="needs a Hopper GPU and a version of Triton that the kernels are written for",
    ),
]

SHAPES = {
    "square": Shapes((2, 4, 512, 0), (2, 4, 512, 0), (2, 4, 512, 0)),
    "grouped": Shapes((1, 6, 300, 0), (1, 2, 300, 0), (1, 2, 300, 0)),
    "more_keys": Shapes((1, 2, 129, 0), (1, 1, 777, 0), (1, 1, 777, 0)),
    "more_queries": Shapes((1, 2, 700, 0), (1, 2, 130, 0), (1, 2, 130, 0)),
    "one_query": Shapes((3, 2, 1, 0), (3, 2, 65, 0), (3, 2, 65, 0)),
    "many_tiles": Shapes((2, 40, 1000, 0), (2, 8, 1000, 0), (2, 8, 1000, 0)),
}
BANDS = {"none": (False, None), "causal": (True, None), "window": (True, 100)}


def settings_of(causal, window, cap=None):
    features = {"window": None if window is None else (window, None), "softcap": cap}
    return {"causal": causal, "features": {name: value for name, value in features.items() if value is not None}}


def inputs_of(shapes, width, dtype, layout="contiguous", v_width=None):
    widths = width, width, v_width or width
    own = Shapes(*[(*shape[:-1], columns) for shape, columns in zip(shapes, widths, strict=True)])
    return make_inputs(own, dtype=dtype, device="cuda", layout=layout)


def results(inputs, causal, window, cap=None, *, deterministic=False):
    """Values and gradients."""
    from cs336_systems.kernels.sm90 import launch

    q, k, v, dout, dlse = inputs
    scale = q.shape[-1] ** -0.5
    settings = Settings(
        causal="bottom_right" if causal else "none",
        window=(window, None),
        scores=() if cap is None else softcap(cap).expression,
        deterministic=deterministic,
    )
    described = settings.text, settings.numbers
    assert why_not_backward(q, k, v, scale, settings) is None
    out, lse = launch.forward(q, k, v, scale, *described)
    dq, dk, dv, _ = launch.backward(q, k, v, out, lse, dout, dlse, scale, *described)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def assert_right(actual, inputs, causal, window, cap=None):
    settings = settings_of(causal, window, cap)
    expected = [
        {name: result[name] for name in actual}
        for result in (oracle(inputs, **settings), naive_results(inputs, **settings), terms(inputs, **settings))
    ]
    beyond = [finding for finding in compare(actual, *expected) if not finding.holds]
    assert not beyond, "\n".join(map(str, beyond))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [*WIDTHS, 40, 80, 96, 136, 192, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_results_are_within_the_budget(dtype, width, shape, band):
    inputs = inputs_of(SHAPES[shape], width, dtype)
    assert_right(results(inputs, *BANDS[band]), inputs, *BANDS[band])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("band", ["causal", "window"])
def test_rows_may_be_many(width, band):
    inputs = inputs_of(Shapes((1, 2, 4200, 0), (1, 1, 400, 0), (1, 1, 400, 0)), width, torch.bfloat16)
    assert_right(results(inputs, *BANDS[band]), inputs, *BANDS[band])


@pytest.mark.parametrize("cap", [0.5, 20.0])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("width", [*WIDTHS, 80])
def test_scores_may_be_capped(width, band, cap):
    inputs = inputs_of(SHAPES["grouped"], width, torch.bfloat16)
    inputs.q.mul_(4.0)
    call = (*BANDS[band], cap)
    assert_right(results(inputs, *call), inputs, *call)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("width", "v_width"), [(192, 128), (80, 64)])
def test_v_may_be_narrower(width, v_width, shape, band):
    inputs = inputs_of(SHAPES[shape], width, torch.bfloat16, v_width=v_width)
    assert_right(results(inputs, *BANDS[band]), inputs, *BANDS[band])


@pytest.mark.parametrize("layout", ["length_before_heads", "packed"])
@pytest.mark.parametrize("width", WIDTHS)
def test_layouts(width, layout):
    inputs = inputs_of(SHAPES["square"], width, torch.bfloat16, layout)
    made = results(inputs, True, None)
    assert_right(made, inputs, True, None)
    if layout == "length_before_heads":
        assert made["out"].stride() == inputs.q.stride()


@pytest.mark.parametrize("band", ["none", "causal"])
@pytest.mark.parametrize("width", WIDTHS)
def test_weights_that_overflow_are_computed_again(width, band):
    inputs = inputs_of(SHAPES["many_tiles"], width, torch.bfloat16)
    q, k = inputs.q, inputs.k
    # An early key far above all that are visited before: for one head's queries, and for some rows of another's.
    q[:, 1, :, 0], k[:, 0, 3, 0] = 20.0, 400.0
    q[:, 17, 600:700, 1], k[:, 3, 10, 1] = 30.0, 300.0
    assert_right(results(inputs, *BANDS[band]), inputs, *BANDS[band])


def test_nan_stays_in_its_head():
    inputs = inputs_of(SHAPES["many_tiles"], 128, torch.bfloat16)
    inputs.k[1, 3, 5, 7] = math.nan
    out = results(inputs, False, None)["out"]
    spoilt = torch.zeros(2, 40, dtype=torch.bool, device="cuda")
    spoilt[1, 15:20] = True
    assert out[spoilt].isnan().all()
    assert out[~spoilt].isfinite().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_values_are_the_same_every_time(width):
    inputs = inputs_of(SHAPES["many_tiles"], width, torch.bfloat16)
    first = results(inputs, True, None)
    for _ in range(20):
        again = results(inputs, True, None)
        assert all(torch.equal(first[name], again[name]) for name in ("out", "lse"))


@pytest.mark.parametrize("band", [*BANDS, "window_alone"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("width", [64, 80, 128])
def test_gradients_are_the_same_every_time_if_asked_for(width, shape, band):
    inputs = inputs_of(SHAPES[shape], width, torch.bfloat16)
    causal, window = (False, 100) if band == "window_alone" else BANDS[band]
    first = results(inputs, causal, window, deterministic=True)
    assert_right(first, inputs, causal, window)
    for _ in range(20):
        again = results(inputs, causal, window, deterministic=True)
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_captured_graph_can_be_replayed():
    from cs336_systems.kernels.sm90 import launch

    inputs = inputs_of(SHAPES["many_tiles"], 128, torch.bfloat16)
    arguments = (*inputs[:3], 128**-0.5, Settings(causal="bottom_right").text)
    expected, _ = launch.forward(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = launch.forward(*arguments)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
