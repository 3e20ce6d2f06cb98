"""The kernels for Hopper on a CPU: what they compute, and that the emulator notices what would hang or be wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from cs336_systems.attention.call import Arguments, make_call
from cs336_systems.kernels.call import NO_AUX, Call
from cs336_systems.testing import Shapes, assert_packed_within_budget, assert_within_budget, make_inputs, make_packed

from .emulator import emulated
from .emulator.values import Pointer, Value
from .hopper import BANDS, compute, heads_first, options_of, oracle_settings, packed_aux, rows_first

SHAPES = {
    "square": Shapes((1, 2, 260, 0), (1, 2, 260, 0), (1, 2, 260, 0)),
    "grouped": Shapes((2, 4, 130, 0), (2, 2, 130, 0), (2, 2, 130, 0)),
    "more_keys": Shapes((1, 2, 65, 0), (1, 1, 333, 0), (1, 1, 333, 0)),
    "more_queries": Shapes((1, 2, 300, 0), (1, 2, 70, 0), (1, 2, 70, 0)),
    "one_query": Shapes((2, 2, 1, 0), (2, 2, 65, 0), (2, 2, 65, 0)),
}
DIMS = [
    *((64, 64), (24, 24), (128, 128), (256, 256), (80, 80), (96, 96), (80, 64), (192, 192), (192, 128), (136, 72)),
    *((264, 264), (400, 400), (320, 64)),
]


def inputs_of(shape, d, dv=None, dtype=torch.bfloat16):
    shapes = Shapes(*[(*x[:-1], columns) for x, columns in zip(SHAPES[shape], (d, d, dv or d), strict=True)])
    return make_inputs(shapes, dtype=dtype)


def results(inputs, calls=1, **arguments):
    return compute(inputs, options_of(inputs.q.shape[-1], **arguments), calls=calls, backend=emulated().backend)


def check(inputs, *, deterministic=False, calls=1, **arguments):
    actual = results(inputs, calls, deterministic=deterministic, **arguments)
    settings = oracle_settings(**arguments)
    assert_within_budget(actual, inputs, **settings)
    return actual


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("band", ["none", "causal", "window"])
def test_results_are_within_the_budget(shape, band):
    check(inputs_of(shape, 64), **BANDS[band])


@pytest.mark.parametrize("band", ["none", "causal", "around"])
@pytest.mark.parametrize(("d", "dv"), DIMS[1:])
def test_head_dimensions(d, dv, band):
    check(inputs_of("grouped", d, dv), **BANDS[band])


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (256, 256), (160, 160), (160, 128), (512, 512)])
def test_softcap_and_float16(d, dv):
    inputs = inputs_of("grouped", d, dv, dtype=torch.float16)
    inputs.q.mul_(4.0)
    check(inputs, causal="bottom_right", softcap=2.0)


@pytest.mark.parametrize("band", ["none", "causal"])
def test_tiles_that_overflow_are_computed_again(band):
    """Twice, as lists of tiles and counters are kept from call to call."""
    inputs = inputs_of("square", 64)
    inputs.q[:, 1, :, 0], inputs.k[:, 1, 3, 0] = 20.0, 400.0
    check(inputs, calls=2, **BANDS[band])


@pytest.mark.parametrize("band", ["none", "causal", "window_alone"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_deterministic_gradients(d, dv, band):
    inputs = inputs_of("more_keys", d, dv)
    first, again = (check(inputs, deterministic=True, **BANDS[band]) for _ in range(2))
    assert torch.equal(first["dq"], again["dq"])


@pytest.mark.parametrize("band", ["none", "causal", "top_left", "window"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (72, 72), (256, 256), (136, 136), (192, 128), (400, 400)])
def test_packed_sequences(d, dv, band):
    lengths = [(70, 90), (0, 4), (129, 129), (1, 0), (40, 33)]
    inputs = make_packed(lengths, heads=(4, 2), d=d, dv=dv, beyond=5, dtype=torch.bfloat16)
    options, aux = options_of(d, **BANDS[band]), packed_aux(lengths, "cpu")
    actual = rows_first(compute(heads_first(inputs), options, aux, calls=1, backend=emulated().backend))
    assert_packed_within_budget(actual, inputs, lengths, **oracle_settings(**BANDS[band]))


@pytest.mark.parametrize("order", ["ascending", "any"])
@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 700])
def test_the_sequence_of_a_tile(count, order):
    """Of several the last, and always one that begins no later than the tile."""
    varlen = emulated().varlen
    starts = torch.randint(-300, 2000, (count + 1,), dtype=torch.int32)
    if order == "ascending":
        starts = starts.clamp(min=0).sort()[0]
    slots = starts.clamp(min=0) // 64 + torch.arange(count + 1)
    slots[0] = 0
    for tile in range(0, 2000 // 64 + count + 1, 1 + count // 50):
        found = int(varlen.sequence_of(Pointer(starts), Value(torch.tensor(tile)), count, 64).x)
        assert 0 <= found <= count
        assert slots[found] <= tile
        if order == "ascending":
            assert found == (slots <= tile).nonzero().max()


def test_nan_stays_in_its_head():
    inputs = inputs_of("grouped", 64)
    inputs.k[1, 1, 5, 7] = math.nan
    out = results(inputs)["out"]
    assert out[1, 2:].isnan().all()
    assert out[0].isfinite().all()
    assert out[1, :2].isfinite().all()


def never_released(memory, n):
    """In place of a release."""


@pytest.mark.parametrize("pipeline", ["Pipeline", "NamedPipeline"])
def test_a_role_that_waits_forever_is_noticed(monkeypatch, pipeline):
    monkeypatch.setattr(getattr(emulated().pipeline, pipeline), "release", never_released)
    with pytest.raises(RuntimeError, match="all roles wait"):
        results(inputs_of("square", 64))


def nothing(*unused):
    """In place of a fence, or of a wait for TMA."""


def not_waited_for(left, values):
    """In place of a wait for products."""
    return values[0] if len(values) == 1 else tuple(values)


FORGOTTEN = {
    "products": (
        "forward_mainloop",
        "warpgroup_mma_wait",
        not_waited_for,
        "written while a product or TMA may read it",
    ),
    "stores": ("forward", "tma", SimpleNamespace(store_wait=nothing), "written while a product or TMA may read it"),
    "fence": ("backward_consumer", "fence_async_shared", nothing, "no fence after what threads have stored"),
    "fence_of_dq": ("backward_products", "fence_async_shared", nothing, "no fence after what threads have stored"),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_is_not_waited_for_is_noticed(monkeypatch, name):
    module, attribute, instead, message = FORGOTTEN[name]
    monkeypatch.setattr(getattr(emulated(), module), attribute, instead)
    if name == "products":
        monkeypatch.setattr(
            emulated().forward_mainloop, "wait_pv", lambda out, out_tail, operand, tail: (out, out_tail)
        )
    with pytest.raises(AssertionError, match=message):
        results(inputs_of("square", 64))


def with_an_early_release(monkeypatch):
    """The first tile of a bias is released before it is used."""
    monkeypatch.setattr(emulated().forward_mainloop, "fence_async_shared", nothing)
    inputs = make_inputs(Shapes.of(1, q_len=256, d=64, q_heads=2, kv_heads=2), dtype=torch.bfloat16)
    bias = torch.randn(1, 2, 256, 256, dtype=torch.bfloat16)
    call = make_call(*inputs[:3], Arguments.of(bias=bias))
    return inputs, call.options, call.aux


def with_rows_in_a_stage(monkeypatch):
    """lse2 lies in the stage of a piece, which is released before."""
    for module in (emulated().backward_piece_producer, emulated().backward_pieces):
        monkeypatch.setattr(module, "row_buffer", lambda buffers, n: buffers.index(0))
    return inputs_of("square", 512), options_of(512), NO_AUX


@pytest.mark.parametrize("change", [with_an_early_release, with_rows_in_a_stage])
def test_a_release_before_loads_are_finished_is_noticed(monkeypatch, change):
    arguments = change(monkeypatch)
    with pytest.raises(AssertionError, match="TMA overwrites what is still being loaded"):
        compute(*arguments, backend=emulated().backend)


def test_what_was_never_written_is_noticed(monkeypatch):
    """Shared memory holds NaN before."""
    monkeypatch.setattr(emulated().forward_producer, "async_load", lambda desc, coords, barrier, buffer: barrier.arrive(
        0, came=buffer.numel * 2
    ))  # fmt: skip
    out, _ = emulated().backend.plan_forward(Call(*inputs_of("one_query", 64)[:3], options_of(64)))(
        *inputs_of("one_query", 64)[:3]
    )
    assert out.isnan().any()
