"""Packed sequences by the kernels for Hopper, on one: each gives what it gives by itself, whatever its neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention.variants import softcap
from cs336_systems.kernels.settings import Settings
from cs336_systems.kernels.sm90.config import WIDTHS
from cs336_systems.kernels.sm90.coverage import why_not_backward
from cs336_systems.kernels.versions import why_not_gluon
from cs336_systems.testing import assert_packed_within_budget, make_packed, poisoned_memory, starts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or why_not_gluon() is not None,
        reason="needs a Hopper GPU and a version of Triton that the kernels are written for",
    ),
]

LENGTHS = {
    "short": [(3, 5), (0, 4), (40, 33), (70, 90), (1, 0), (9, 9)],
    "long": [(129, 129), (0, 0), (700, 777), (1, 1), (128, 128), (256, 130), (130, 400)],
    "one": [(1000, 1000)],
    # More than there are multiprocessors, many of them spare.
    "many": [(number * 37 % 261, number * 53 % 301) for number in range(60)],
    "empty": [(0, 0), (0, 7), (7, 0), (0, 0)],
}
BANDS = {
    "none": ("none", (None, None)),
    "causal": ("bottom_right", (None, None)),
    "top_left": ("top_left", (None, None)),
    "window": ("bottom_right", (100, None)),
    "around": ("none", (30, 20)),
}
HEADS = (4, 2)


def made(lengths, width, dtype=torch.bfloat16, v_width=None, beyond=5):
    return make_packed(lengths, heads=HEADS, d=width, dv=v_width, beyond=beyond, dtype=dtype, device="cuda")


def results(inputs, lengths, band="causal", cap=None, integers=torch.int32, numbers=None):
    """Values and gradients, with rows before heads."""
    from cs336_systems.kernels.sm90 import launch

    q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs[:4])
    starts = [starts_of(column, "cuda").to(integers) for column in zip(*lengths, strict=True)]
    if numbers is not None:
        starts = [torch.tensor(numbers, dtype=integers, device="cuda")] * 2
    causal, window = BANDS[band]
    settings = Settings(causal, window, scores=() if cap is None else softcap(cap).expression, packed=(None, None))
    scale = q.shape[-1] ** -0.5
    assert why_not_backward(q, k, v, scale, settings) is None
    call = scale, settings.text, settings.numbers, starts
    with poisoned_memory():
        out, lse = launch.forward(q, k, v, *call)
        dq, dk, dv, _ = launch.backward(q, k, v, out, lse, dout, inputs.dlse[None], *call)
    by_rows = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return {name: x[0].transpose(0, 1) for name, x in by_rows.items()} | {"lse": lse[0]}


def assert_right(actual, inputs, lengths, band="causal", cap=None):
    causal, window = BANDS[band]
    features = {"window": None if window == (None, None) else window, "softcap": cap}
    given = {name: value for name, value in features.items() if value is not None}
    aligned = False if causal == "none" else causal
    assert_packed_within_budget(actual, inputs, lengths, causal=aligned, features=given)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [*WIDTHS, 40, 80, 96, 192])
def test_results_are_within_the_budget(width, lengths, band):
    inputs = made(LENGTHS[lengths], width)
    assert_right(results(inputs, LENGTHS[lengths], band), inputs, LENGTHS[lengths], band)


@pytest.mark.parametrize("lengths", ["long", "many"])
@pytest.mark.parametrize(("width", "v_width"), [(192, 128), (80, 64)])
def test_v_may_be_narrower(width, v_width, lengths):
    inputs = made(LENGTHS[lengths], width, v_width=v_width)
    assert_right(results(inputs, LENGTHS[lengths]), inputs, LENGTHS[lengths])


@pytest.mark.parametrize("width", [*WIDTHS, 80])
def test_scores_may_be_capped(width):
    inputs = made(LENGTHS["long"], width)
    inputs.q.mul_(4.0)
    assert_right(results(inputs, LENGTHS["long"], "causal", 5.0), inputs, LENGTHS["long"], "causal", 5.0)


@pytest.mark.parametrize("beyond", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_after_the_last_sequence_see_nothing(integers, dtype, beyond):
    inputs = made(LENGTHS["long"], 64, dtype, beyond=beyond)
    for x in (*inputs[:4], inputs.dlse.T):
        x[len(x) - beyond :] = math.nan
    actual = results(inputs, LENGTHS["long"], integers=integers)
    assert_right(actual, inputs, LENGTHS["long"])
    if beyond:
        assert all((actual[name][-beyond:] == 0).all() for name in ("out", "dq", "dk", "dv"))
        assert (actual["lse"][:, -beyond:] == -math.inf).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_one_tensor_may_hold_q_k_and_v(width):
    lengths = [(x, x) for x in (5, 300, 0, 129)]
    inputs = made(lengths, width)
    rows = sum(length for length, _ in lengths) + 5
    together = torch.randn(rows, sum(HEADS) + HEADS[1], width, dtype=torch.bfloat16, device="cuda")
    q, k, v = together.split([HEADS[0], HEADS[1], HEADS[1]], 1)
    inputs = inputs._replace(q=q, k=k, v=v)
    assert_right(results(inputs, lengths), inputs, lengths)


@pytest.mark.parametrize("width", [*WIDTHS, 80])
@pytest.mark.parametrize("band", ["none", "causal"])
def test_nan_stays_in_its_sequence(band, width):
    lengths = [(150, 150), (70, 70), (200, 200), (64, 64)]
    inputs = made(lengths, width)
    expected = results(inputs, lengths, band)
    spoilt = slice(150, 220)
    for x in inputs[:4]:
        x[spoilt] = math.nan
    inputs.dlse[:, spoilt] = math.nan
    actual = results(inputs, lengths, band)
    assert actual["out"][spoilt].isnan().all()
    whole = torch.ones(len(inputs.q), dtype=torch.bool, device="cuda")
    whole[spoilt] = False
    for name in ("out", "dk", "dv"):
        assert torch.equal(actual[name][whole], expected[name][whole]), name
    assert torch.equal(actual["lse"][:, whole], expected["lse"][:, whole])
    assert actual["dq"][whole].isfinite().all()
    torch.testing.assert_close(actual["dq"][whole], expected["dq"][whole])


@pytest.mark.parametrize("band", ["none", "causal"])
@pytest.mark.parametrize("width", [*WIDTHS, 80])
def test_weights_that_overflow_are_computed_again(width, band):
    lengths = [(number * 37 % 261, number * 37 % 261) for number in range(20)] + [(900, 900), (300, 300)] * 4
    inputs = made(lengths, width)
    long = sum(length for length, _ in lengths[:20])
    # An early key far above all that are visited before: for one head's queries, and for some rows of another's.
    inputs.q[long : long + 900, 1, 0], inputs.k[long + 3, 0, 0] = 20.0, 400.0
    inputs.q[long + 600 : long + 700, 2, 1], inputs.k[long + 10, 1, 1] = 30.0, 300.0
    assert_right(results(inputs, lengths, band), inputs, lengths, band)


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_out_of_order_leave_the_next_call_as_it_is(width):
    lengths = [(100, 100), (60, 60), (400, 400)]
    inputs = made(lengths, width)
    expected = results(inputs, lengths)
    disorder = [[0, 200, 160, 560], [5, -7, 2**31 - 1, 3], [-(2**31), 2**31 - 1, -1, 0], [560, 300, 80, 0]]
    for numbers in [*disorder, [0, -(2**31), -(2**31), 5], [0, 0, 0, 0], [0, 500, 0, 500]]:
        results(inputs, lengths, numbers=numbers)
        torch.cuda.synchronize()
    again = results(inputs, lengths)
    assert all(torch.equal(expected[name], again[name]) for name in ("out", "lse", "dk", "dv"))


def test_nothing_waits_for_the_device_and_nothing_is_compiled_anew(waiting_forbidden):
    from cs336_systems.kernels.sm90.backward import backward_kernel
    from cs336_systems.kernels.sm90.forward import forward_kernel
    from cs336_systems.kernels.sm90.rows import finish_kernel, prepare_kernel

    def call(lengths):
        both = [(length, length) for length in lengths]
        inputs = made(both, 64)
        starts = starts_of(lengths, "cuda")
        torch.cuda.synchronize()
        with waiting_forbidden():
            attend(inputs, starts)

    def attend(inputs, starts):
        from cs336_systems.kernels.sm90 import launch

        q, k, v, dout = (x.transpose(0, 1)[None] for x in inputs[:4])
        settings = Settings("bottom_right", packed=(None, None))
        given = 0.125, settings.text, settings.numbers, [starts, starts]
        out, lse = launch.forward(q, k, v, *given)
        launch.backward(q, k, v, out, lse, dout, inputs.dlse[None], *given)

    kernels = forward_kernel, backward_kernel, prepare_kernel, finish_kernel
    call([100, 28, 256])
    call([100] * 60)
    compiled = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for lengths in ([1, 700], [33, 65, 5, 9], [16] * 160, [384], [5000]):
        call(lengths)
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == compiled


def test_a_captured_graph_can_be_replayed_with_other_lengths():
    from cs336_systems.kernels.sm90 import launch

    lengths = [(x, x) for x in (300, 5, 0, 600)]
    inputs = made(lengths, 128)
    q, k, v = (x.transpose(0, 1)[None] for x in inputs[:3])
    starts = starts_of([1, 2, 3, 4], "cuda")
    settings = Settings("bottom_right", packed=(None, None))
    call = q, k, v, 0.1, settings.text, settings.numbers
    expected, _ = launch.forward(*call, [starts_of([x for x, _ in lengths], "cuda")] * 2)
    launch.forward(*call, [starts, starts])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = launch.forward(*call, [starts, starts])
    starts.copy_(starts_of([x for x, _ in lengths], "cuda"))
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
