"""Packed and nested sequences: each gives what it gives by itself, and no length is asked of a GPU."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.attention import Attention, attention, attention_varlen
from cs336_systems.attention.variants import block_local, dilated
from cs336_systems.testing import Inputs, Shapes, assert_within_budget, evaluate, make_inputs, make_packed, starts_of

from .features import Maker
from .helpers import (
    COMPILES,
    DOUBLE,
    FLOAT,
    FLOATS,
    HALF,
    assert_packed_within_budget,
    assert_same,
    check_packed,
    each_dtype,
    each_implementation,
    named,
    one_graph,
    packed_arguments,
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


@pytest.mark.parametrize("name", named(CASES, FAST, every_triton=[*FAST, "relative_bias", "rules"]))
@each_dtype(flash=FLOATS, tiled=(FLOAT, DOUBLE), naive=(DOUBLE,))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, name):
    causal, features = CASES[name]
    inputs = make_packed(LENGTHS, heads=HEADS, d=8, dv=12, beyond=3, dtype=dtype, device=device)
    check_packed(impl, inputs, LENGTHS, causal, features(maker(LENGTHS, HEADS[0], dtype, device)))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("lengths", [LENGTHS, [(3, 0), (0, 5)], [(7, 2), (0, 0)], [(2, 2)]])
@pytest.mark.parametrize("dtype", [FLOAT, pytest.param(HALF, marks=slow), pytest.param(DOUBLE, marks=slow)])
def test_torch_computes_one_sequence_after_another_on_a_cpu(lengths, causal, dtype):
    inputs = make_packed(lengths, heads=HEADS, d=8, dv=8, beyond=3, dtype=dtype)
    check_packed("sdpa", inputs, lengths, causal)


@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("window", [(3, None), (20, 4)])
def test_tiles_of_long_and_short_sequences(causal, window):
    """Short ones share tiles; of a long one, what no row of a tile sees is skipped."""
    lengths = [(5, 7)] * 9 + [(100, 190), (1, 2), (150, 60), (0, 9), (3, 0), (40, 40)]
    inputs = make_packed(lengths, heads=(2, 1), d=8, beyond=5, dtype=FLOAT)
    given = packed_arguments(lengths, inputs.q.device)
    attend = partial(attention_varlen, causal=causal, window=window, return_lse=True, impl="tiled", **given)
    results = evaluate(attend, inputs)
    assert_packed_within_budget(results, inputs, lengths, causal=causal, features={"window": window})


def test_heads_wider_than_a_tile(flash_device):
    lengths = [(3, 5), (0, 2), (18, 20)]
    check_packed("flash", make_packed(lengths, d=272, dv=264, beyond=2, device=flash_device), lengths, True)


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


NESTED = (5, 0, 4, 11)


def nested(starts, heads, d=16, dtype=torch.float32):
    """(batch, heads, *, d)."""
    values = torch.randn(int(starts[-1]), heads, d, dtype=dtype, device=starts.device)
    return torch.nested.nested_tensor_from_jagged(values, starts).transpose(1, 2).detach().requires_grad_()


def made(device, k_lengths=NESTED):
    starts, k_starts = starts_of(NESTED, device).long(), starts_of(k_lengths, device).long()
    return nested(starts, 4), nested(k_starts, 2), nested(k_starts, 2)


@pytest.mark.parametrize("k_lengths", [pytest.param(NESTED, marks=slow), (3, 1, 9, 20)], ids=["self", "cross"])
@pytest.mark.parametrize("impl", ["flash", "tiled", "naive", "auto"])
def test_each_nested_sequence_gives_what_it_gives_by_itself(impl, device, k_lengths):
    inputs = made(device, k_lengths)
    out, lse = attention(*inputs, causal=True, softcap=3.0, impl=impl, return_lse=True)
    assert out.shape[:2] == (4, 4)
    assert out.shape[2] == inputs[0].shape[2]
    assert lse.shape == out.shape[:3]
    gradients = torch.autograd.grad((out.values().sum(), lse.values().sum()), inputs)
    for q, k, v, *own in zip(*[x.detach().unbind() for x in (*inputs, out, lse, *gradients)], strict=True):
        results = dict(zip(("out", "lse", "dq", "dk", "dv"), (x[None] for x in own), strict=True))
        ones = torch.ones_like(results["out"]), torch.ones_like(results["lse"])
        alone = Inputs(q[None], k[None], v[None], *ones)
        assert_within_budget(results, alone, causal=True, features={"softcap": 3.0})


def test_nested_results_fit_the_queries(device):
    q, k, v = made(device)
    assert (attention(q, k, v) + q).shape == q.shape
    assert Attention(causal=True)(q, k, v).shape == q.shape


class TestNestedCompiled:
    pytestmark = COMPILES

    @pytest.mark.parametrize("impl", named(["flash", "naive"], []))
    def test_one_graph_for_all_lengths(self, impl, device):
        attend = one_graph(lambda *qkv: attention(*qkv, causal=True, impl=impl))
        for lengths in ((3, 6), (7, 14, 2)):
            starts = starts_of(lengths, device).long()
            inputs = nested(starts, 4), nested(starts, 2), nested(starts, 2)
            expected = attention(*inputs, causal=True, impl=impl)
            torch.testing.assert_close(attend(*inputs).values(), expected.values())


JAGGED = "must be a nested tensor of layout torch.jagged, as q, k and v all are"
DENSE = torch.zeros(4, 2, 5, 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": DENSE}, TypeError, f"k {JAGGED}; got layout torch.strided"),
        ({"v": None}, TypeError, f"v {JAGGED}; got NoneType"),
        ({"q": torch.zeros(4, 4, 5, 16)}, TypeError, "k must be a dense (strided) tensor; got a nested tensor"),
        (
            {"v": nested(starts_of((1, 2, 8, 9)).long(), 2)},
            ValueError,
            "v must have the lengths of k, from the same offsets; got others",
        ),
        (
            {"q": torch.nested.nested_tensor([torch.zeros(2, 16)], layout=torch.jagged)},
            ValueError,
            "q must be nested as (batch, heads, length, d), without holes; got 3 dimensions",
        ),
    ],
)
def test_nested_tensors_that_do_not_fit(change, error, message):
    arguments = dict(zip("qkv", made("cpu"), strict=True)) | change
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        attention(**arguments)
