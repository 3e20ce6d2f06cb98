"""Packed sequences: each gives what it gives by itself, whatever its neighbours, and no length is asked of a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.attention import attention, attention_varlen
from cs336_systems.attention.variants import block_local, dilated
from cs336_systems.testing import Shapes, evaluate, make_inputs, make_packed, starts_of

from .features import Maker
from .helpers import (
    DOUBLE,
    FLOAT,
    FLOATS,
    HALF,
    assert_same,
    check_packed,
    each_dtype,
    each_implementation,
    named,
    slow,
)

LENGTHS = [(3, 5), (0, 4), (40, 33), (70, 90), (1, 0), (9, 9)]
HEADS = (4, 2)


def maker(lengths, heads, dtype, device):
    """Of features of all sequences."""
    return Maker((len(lengths), heads, *map(max, zip(*lengths, strict=True))), dtype, device)


CASES = {
    "plain": (False, lambda make: {}),
    "causal": (True, lambda make: {}),
    "top_left": ("top_left", lambda make: {}),
    "window": (False, lambda make: {"window": (9, 3)}),
    "causal_window": (True, lambda make: {"window": (9, None)}),
    "sinks": (True, lambda make: make.sinks()),
    "slopes": (True, lambda make: make.slopes()),
    "slopes_of_each_sequence": (False, lambda make: make.slopes(True)),
    "bias": (False, lambda make: make.bias("bhqk")),
    "bias_of_all": (True, lambda make: make.bias("qk")),
    "bias_of_keys": (True, lambda make: make.bias("bk")),
    "bias_of_queries": (False, lambda make: make.bias("hq") | {"softcap": 2.0}),
    "bias_of_heads": ("top_left", lambda make: make.bias("h")),
    "relative_bias": (True, lambda make: make.distances("hd", after=20)),
    "mask": (True, lambda make: make.mask("bk")),
    "rules": (False, lambda make: {"mask": ~dilated(3) | block_local(8)} | make.sinks()),
}
FAST = ["causal_window", "bias"]


@pytest.mark.every_triton
@pytest.mark.parametrize("name", named(CASES, FAST))
@each_dtype(flash=FLOATS, tiled=(FLOAT, DOUBLE), naive=(DOUBLE,))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, name):
    causal, features = CASES[name]
    inputs = make_packed(LENGTHS, heads=HEADS, d=8, dv=12, beyond=3, dtype=dtype, device=device)
    check_packed(impl, inputs, LENGTHS, causal, features(maker(LENGTHS, HEADS[0], dtype, device)))


@st.composite
def calls(draw):
    lengths = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=6))
    return {
        "lengths": lengths,
        "heads": draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])),
        "d": draw(st.integers(1, 40)),
        "dv": draw(st.integers(1, 40)),
        "beyond": draw(st.sampled_from([0, 0, 1, 70])),
        "dtype": draw(st.sampled_from([HALF, FLOAT])),
        "name": draw(st.sampled_from(sorted(CASES))),
    }


@slow
@settings(max_examples=12)
@given(call=calls())
def test_flash_of_any_lengths(flash_device, call):
    name, dtype = call.pop("name"), call["dtype"]
    causal, features = CASES[name]
    lengths = call.pop("lengths")
    if not all(max(column) for column in zip(*lengths, strict=True)) and name.startswith(("bias", "mask", "relative")):
        lengths = [*lengths, (1, 1)]
    inputs = make_packed(lengths, device=flash_device, **call)
    check_packed("flash", inputs, lengths, causal, features(maker(lengths, call["heads"][0], dtype, flash_device)))


@pytest.mark.parametrize("features", [{}, {"dropout_p": 0.3, "seed": 7}], ids=["plain", "dropout"])
@each_implementation
def test_equal_lengths_are_a_batch(impl, device, features):
    """To the bit where the kernels see the same tiles; dropout takes the sequence for the entry of the batch."""
    dtype = HALF if impl == "flash" else DOUBLE
    inputs = make_inputs(Shapes.of(2, q_len=37, k_len=45, d=16, q_heads=2, kv_heads=1), dtype=dtype, device=device)
    q, k, v, dout = (x.transpose(1, 2).flatten(0, 1) for x in inputs[:4])
    packed = inputs._replace(q=q, k=k, v=v, dout=dout, dlse=inputs.dlse.transpose(0, 1).flatten(1))
    starts = [starts_of([length] * 2, device) for length in (37, 45)]
    settings = {"causal": True, "impl": impl, "return_lse": True, **features}
    whole = evaluate(partial(attention, **settings), inputs)
    most = 0 if impl == "flash" else 1e-12
    for name, x in evaluate(on(starts, **settings), packed).items():
        expected = (
            whole[name].transpose(0, 1).flatten(1) if name == "lse" else whole[name].transpose(1, 2).flatten(0, 1)
        )
        torch.testing.assert_close(x, expected, rtol=most, atol=most)


def on(starts, impl="flash", **settings):
    """`attention_varlen` of sequences that start there."""
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=False))
    return partial(attention_varlen, impl=impl, **settings, **given)


def test_neighbours_do_not_matter(flash_device):
    """Not even those that are NaN, and neither do the rows after the last sequence."""
    inputs = make_packed([(20, 20), (30, 30), (9, 9)], d=16, beyond=5, dtype=HALF, device=flash_device)
    attend = on([starts_of([20, 30, 9], flash_device)], causal=True, return_lse=True)
    before = evaluate(attend, inputs)
    spoilt = inputs._replace(**{name: getattr(inputs, name).clone() for name in ("q", "k", "v")})
    for x in spoilt[:3]:
        x[:20], x[59:] = torch.nan, torch.nan
    after = evaluate(attend, spoilt)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(after[name][20:59], before[name][20:59]), name
    assert torch.equal(after["out"][59:], torch.zeros_like(after["out"][59:]))


def test_starts_may_be_wide_and_all_have_any_strides(flash_device):
    inputs = make_packed(LENGTHS, heads=(1, 1), d=16, dtype=HALF, device=flash_device)
    plain = [starts_of(column, flash_device) for column in zip(*LENGTHS, strict=True)]
    strange = [starts.long().repeat(2, 1).mT.contiguous()[:, 0] for starts in plain]
    assert not strange[0].is_contiguous()
    strided = inputs._replace(**{name: getattr(inputs, name).mT.contiguous().mT for name in ("q", "k", "v", "dout")})
    assert_same(evaluate(on(plain), inputs), evaluate(on(strange), strided), exact=True)


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_nothing_is_compiled_anew(waiting_forbidden):
    from cs336_systems.kernels.triton.forward import forward_kernel

    def call(lengths):
        inputs = make_packed([(x, x) for x in lengths], d=64, dtype=torch.bfloat16, device="cuda")
        starts = starts_of(lengths, "cuda")
        torch.cuda.synchronize()
        with waiting_forbidden():
            evaluate(on([starts], causal=True), inputs)

    call([100, 28, 256])
    caches = forward_kernel.device_caches[torch.cuda.current_device()][0]
    compiled = len(caches)
    for lengths in ([1, 700], [33, 65, 5, 9], [16] * 16, [384]):
        call(lengths)
    assert len(caches) == compiled


@pytest.mark.gpu
def test_numbers_out_of_order_read_and_write_nothing_out_of_bounds():
    inputs = make_packed([(100, 100), (60, 60)], d=64, dtype=torch.bfloat16, device="cuda")
    for numbers in ([0, 200, 160], [5, -7, 2**31 - 1], [-(2**31), 2**31 - 1, -1], [160, 80, 0], [0, 0, 0]):
        starts = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        evaluate(on([starts], causal=True), inputs)
    torch.cuda.synchronize()
