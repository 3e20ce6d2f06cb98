"""Packed sequences by the kernels for Hopper, on one: each gives what it gives alone, whatever its neighbours."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.kernels.call import Aux, Call
from cs336_systems.kernels.sm90 import backend
from cs336_systems.kernels.sm90.tiles import HEAD_DIMS
from cs336_systems.testing import assert_packed_within_budget, make_packed, poisoned_memory

from .hopper import BANDS, compute, heads_first, on_hopper, options_of, oracle_settings, packed_aux, rows_first

pytestmark = on_hopper

LENGTHS = {
    "short": [(3, 5), (0, 4), (40, 33), (70, 90), (1, 0), (9, 9)],
    "long": [(129, 129), (0, 0), (700, 777), (1, 1), (128, 128), (256, 130), (130, 400)],
    "one": [(1000, 1000)],
    # More than there are multiprocessors, and many empty tiles.
    "many": [(number * 37 % 261, number * 53 % 301) for number in range(60)],
    "empty": [(0, 0), (0, 7), (7, 0), (0, 0)],
}
HEADS = (4, 2)

dims = pytest.mark.parametrize("d", [*HEAD_DIMS, 80, 512])


def packed_inputs(lengths, d, dtype=torch.bfloat16, dv=None, beyond=5):
    return make_packed(lengths, heads=HEADS, d=d, dv=dv, beyond=beyond, dtype=dtype, device="cuda")


def packed_results(inputs, aux, **arguments):
    """Values and gradients, with rows before heads."""
    with poisoned_memory():
        computed = compute(heads_first(inputs), options_of(inputs.q.shape[-1], **arguments), aux)
    return rows_first(computed)


def check_packed(inputs, lengths, integers=torch.int32, **arguments):
    actual = packed_results(inputs, packed_aux(lengths, "cuda", integers), **arguments)
    assert_packed_within_budget(actual, inputs, lengths, **oracle_settings(**arguments))
    return actual


@pytest.mark.parametrize("band", ["none", "causal", "top_left", "window", "around"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("d", [*HEAD_DIMS, 40, 80, 96, 192, 264, 400, 512])
def test_packed_results_are_within_the_budget(d, lengths, band):
    check_packed(packed_inputs(LENGTHS[lengths], d), LENGTHS[lengths], **BANDS[band])


@pytest.mark.parametrize("band", ["none", "causal", "window"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (136, 72), (160, 128), (80, 64), (320, 64)])
def test_packed_v_may_be_narrower(d, dv, lengths, band):
    check_packed(packed_inputs(LENGTHS[lengths], d, dv=dv), LENGTHS[lengths], **BANDS[band])


@dims
def test_packed_softcap(d):
    inputs = packed_inputs(LENGTHS["long"], d)
    inputs.q.mul_(4.0)
    check_packed(inputs, LENGTHS["long"], causal="bottom_right", softcap=5.0)


@pytest.mark.parametrize("beyond", [0, 1, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_rows_after_the_last_sequence_see_nothing(integers, dtype, beyond):
    inputs = packed_inputs(LENGTHS["long"], 64, dtype, beyond=beyond)
    for x in (*inputs[:4], inputs.dlse.T):
        x[len(x) - beyond :] = math.nan
    actual = check_packed(inputs, LENGTHS["long"], integers, causal="bottom_right")
    if beyond:
        assert all((actual[name][-beyond:] == 0).all() for name in ("out", "dq", "dk", "dv"))
        assert (actual["lse"][:, -beyond:] == -math.inf).all()


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_one_tensor_may_hold_packed_q_k_and_v(d):
    lengths = [(x, x) for x in (5, 300, 0, 129)]
    inputs = packed_inputs(lengths, d)
    together = torch.randn(len(inputs.q), sum(HEADS) + HEADS[1], d, dtype=torch.bfloat16, device="cuda")
    q, k, v = together.split([HEADS[0], HEADS[1], HEADS[1]], 1)
    check_packed(inputs._replace(q=q, k=k, v=v), lengths, causal="bottom_right")


@dims
@pytest.mark.parametrize("band", ["none", "causal"])
def test_nan_stays_in_its_sequence(band, d):
    lengths = [(150, 150), (70, 70), (200, 200), (64, 64)]
    aux = packed_aux(lengths, "cuda")
    inputs = packed_inputs(lengths, d)
    expected = packed_results(inputs, aux, **BANDS[band])
    spoilt = slice(150, 220)
    for x in (*inputs[:4], inputs.dlse.T):
        x[spoilt] = math.nan
    actual = packed_results(inputs, aux, **BANDS[band])
    assert actual["out"][spoilt].isnan().all()
    is_sound = torch.ones(len(inputs.q), dtype=torch.bool, device="cuda")
    is_sound[spoilt] = False
    for name in ("out", "dk", "dv"):
        assert torch.equal(actual[name][is_sound], expected[name][is_sound]), name
    assert torch.equal(actual["lse"][:, is_sound], expected["lse"][:, is_sound])
    assert actual["dq"][is_sound].isfinite().all()
    torch.testing.assert_close(actual["dq"][is_sound], expected["dq"][is_sound])


@pytest.mark.parametrize("band", ["none", "causal"])
@dims
def test_packed_tiles_that_overflow_are_computed_again(d, band):
    lengths = [(number * 37 % 261, number * 37 % 261) for number in range(20)] + [(900, 900), (300, 300)] * 4
    inputs = packed_inputs(lengths, d)
    first = sum(length for length, _ in lengths[:20])
    inputs.q[first : first + 900, 1, 0], inputs.k[first + 3, 0, 0] = 20.0, 400.0
    inputs.q[first + 600 : first + 700, 2, 1], inputs.k[first + 10, 1, 1] = 30.0, 300.0
    check_packed(inputs, lengths, **BANDS[band])


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_cu_seqlens_out_of_order_leave_the_next_call_as_it_is(d):
    lengths = [(100, 100), (60, 60), (400, 400)]
    aux = packed_aux(lengths, "cuda")
    inputs = packed_inputs(lengths, d)
    # Some tiles overflow, so that retry lists are in use.
    inputs.q[160:, 1, 0], inputs.k[163, 0, 0] = 20.0, 400.0
    expected = packed_results(inputs, aux, causal="bottom_right")
    disorder = [[0, 200, 160, 560], [5, -7, 2**31 - 1, 3], [-(2**31), 2**31 - 1, -1, 0], [560, 300, 80, 0]]
    for numbers in [*disorder, [0, -(2**31), -(2**31), 5], [0, 0, 0, 0], [0, 500, 0, 500]]:
        starts = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        packed_results(inputs, Aux(cu_seqlens_q=starts, cu_seqlens_k=starts), causal="bottom_right")
        torch.cuda.synchronize()
    again = packed_results(inputs, aux, causal="bottom_right")
    assert all(torch.equal(expected[name], again[name]) for name in ("out", "lse", "dk", "dv"))


def test_no_synchronization_and_no_compilation_for_other_lengths(waiting_forbidden):
    from cs336_systems.kernels.sm90.backward import backward_kernel
    from cs336_systems.kernels.sm90.backward_rows import finish_kernel, prepare_kernel
    from cs336_systems.kernels.sm90.forward import forward_kernel

    def call(lengths):
        both = [(length, length) for length in lengths]
        inputs, aux = packed_inputs(both, 64), packed_aux(both, "cuda")
        inputs = heads_first(inputs)
        torch.cuda.synchronize()
        with waiting_forbidden():
            compute(inputs, options_of(64, causal="bottom_right"), aux)

    kernels = forward_kernel, backward_kernel, prepare_kernel, finish_kernel
    call([100, 28, 256])
    call([100] * 60)
    compiled = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
    for lengths in ([1, 700], [33, 65, 5, 9], [16] * 160, [384], [5000]):
        call(lengths)
    assert [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels] == compiled


def test_a_captured_graph_can_be_replayed_with_other_lengths():
    lengths = [(x, x) for x in (300, 5, 0, 600)]
    aux = packed_aux(lengths, "cuda")
    q, k, v = (x.transpose(0, 1)[None] for x in packed_inputs(lengths, 128)[:3])
    forward = backend.plan_forward(Call(q, k, v, options_of(128, causal="bottom_right"), aux))
    expected, _ = forward(q, k, v, aux)
    right = [starts.clone() for starts in (aux.cu_seqlens_q, aux.cu_seqlens_k)]
    for starts in (aux.cu_seqlens_q, aux.cu_seqlens_k):
        starts.copy_(torch.tensor([0, 1, 3, 6, 10]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = forward(q, k, v, aux)
    for starts, numbers in zip((aux.cu_seqlens_q, aux.cu_seqlens_k), right, strict=True):
        starts.copy_(numbers)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
