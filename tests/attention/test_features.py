"""Windows, caps, slopes, biases, masks, rules, sinks and dropout, alone and together, against float64 in the budget."""

from __future__ import annotations

from operator import methodcaller

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cs336_systems.attention import attention
from cs336_systems.testing import Shapes, make_inputs

from .features import Maker, together
from .helpers import DOUBLE, FLOAT, FLOATS, HALF, check, each_dtype, named, sizes_of, slow

DROPPED = {"dropout_p": 0.3, "seed": -(2**40) + 5}
ALONE = {
    "window": lambda make: {"window": (30, 4)},
    "window_before": lambda make: {"window": (9, None)},
    "softcap": lambda make: {"softcap": 0.8},
    "alibi": lambda make: make.slopes(),
    "alibi_of_each_entry": lambda make: make.slopes(True),
    "bias": lambda make: make.bias("bhqk"),
    "bias_of_keys": lambda make: make.bias("k"),
    "bias_of_queries": lambda make: make.bias("hq"),
    "bias_of_entries": lambda make: make.bias("b"),
    "mask": lambda make: make.mask("bhqk"),
    "mask_of_keys": lambda make: make.mask("bk"),
    "documents": lambda make: make.documents(),
    "prefixes": lambda make: make.prefixes(),
    "rules": lambda make: make.rules(),
    "distances": lambda make: make.distances("hd"),
    "distances_of_entries": lambda make: make.distances("bd", before=3),
    "distances_of_all": lambda make: make.distances("d", after=40),
    "distances_that_are_one": lambda make: make.distances("bh"),
    "sinks": lambda make: make.sinks(),
    "dropout": lambda make: DROPPED,
}
TOGETHER = {
    "window_sinks_cap": lambda make: {"window": (20, None), "softcap": 2.0} | make.sinks(),
    "alibi_documents_sinks": lambda make: make.slopes() | make.documents() | make.sinks(),
    "bias_mask_dropout": lambda make: make.bias("hqk") | make.mask("qk") | DROPPED,
    "rules_prefixes_sinks": lambda make: make.rules() | make.prefixes() | make.sinks(),
    "cap_alibi_bias_rules": lambda make: {"softcap": 1.5} | make.slopes() | make.bias("qk") | make.rules(),
    "distances_window_bias_dropout": lambda make: (
        {"window": (25, None)} | make.distances("bhd", 2, 1) | make.bias("hqk") | DROPPED
    ),
    "rules_around_distances": lambda make: (
        {"softcap": 2.0} | together(make.rules(), make.distances("hd"), make.rules()) | make.documents()
    ),
    "window_mask_dropout_sinks": lambda make: {"window": (None, 7)} | make.mask("bhk") | DROPPED | make.sinks(),
}
GROUPED = Shapes.of(2, q_len=35, k_len=41, d=8, dv=12, q_heads=2, kv_heads=1)


FAST = ["window", "alibi", "bias_of_keys", "documents", "rules", "distances", "window_mask_dropout_sinks"]


@pytest.mark.parametrize("name", named([*ALONE, *TOGETHER], FAST))
@each_dtype(flash=FLOATS, tiled=(FLOAT, DOUBLE))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, name):
    inputs = make_inputs(GROUPED, dtype=dtype, device=device)
    features = {**ALONE, **TOGETHER}[name](Maker(sizes_of(GROUPED), dtype, device))
    check(impl, inputs, features, causal="bottom_right" if name in TOGETHER else False)


# A tensor for each pair, one for each row, for each column and for each distance: the ways in which tiles meet.
@pytest.mark.parametrize(
    "name", ["window", "softcap", "alibi", "bias", "mask", "documents", "rules", "distances", "sinks", "dropout"]
)
@slow
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((130, 150), id="more_keys", marks=pytest.mark.every_triton),
        pytest.param((150, 130), id="more_queries"),
    ],
)
def test_lengths_beyond_a_tile(flash_device, lengths, name):
    shapes = Shapes.of(1, q_len=lengths[0], k_len=lengths[1], d=16, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, dtype=HALF, device=flash_device)
    check("flash", inputs, ALONE[name](Maker(sizes_of(shapes), HALF, flash_device)), causal="top_left")


AXES = st.sets(st.sampled_from("bhqk"))
SIDES = st.one_of(st.none(), st.integers(0, 45))
MASKS = st.one_of(
    st.builds(methodcaller, st.just("mask"), AXES), st.sampled_from([ALONE["documents"], ALONE["prefixes"]])
)
MAKERS = {
    "window": st.builds(methodcaller, st.just("window"), SIDES, SIDES),
    "softcap": st.builds(methodcaller, st.just("softcap"), st.floats(0.1, 50.0)),
    "slopes": st.builds(methodcaller, st.just("slopes"), st.booleans()),
    "bias": st.builds(methodcaller, st.just("bias"), AXES),
    "mask": MASKS,
    "rules": st.just(ALONE["rules"]),
    "distances": st.builds(
        methodcaller, st.just("distances"), st.sets(st.sampled_from("bhd")), st.integers(0, 20), st.integers(0, 20)
    ),
    "sinks": st.just(ALONE["sinks"]),
    "dropout": st.builds(methodcaller, st.just("dropout"), st.floats(0.0, 1.0), st.integers(-(2**63), 2**64 - 1)),
}


@st.composite
def shapes(draw):
    length, width, kv_heads = st.integers(1, 36), st.integers(1, 20), draw(st.integers(1, 2))
    heads = {"q_heads": kv_heads * draw(st.integers(1, 2)), "kv_heads": kv_heads}
    lengths = {"q_len": draw(length), "k_len": draw(length)}
    return Shapes.of(draw(st.integers(1, 2)), **lengths, d=draw(width), dv=draw(width), **heads)


def calls(dtypes):
    """Each feature is there or not, and its tensors have any shape that broadcasts."""
    return st.fixed_dictionaries(
        {
            "shapes": shapes(),
            "dtype": st.sampled_from(dtypes),
            "causal": st.sampled_from([False, "top_left", "bottom_right"]),
            "makers": st.fixed_dictionaries({}, optional=MAKERS),
            "seed": st.integers(0, 2**32 - 1),
        }
    )


def check_call(impl, device, call):
    torch.manual_seed(call["seed"])
    inputs = make_inputs(call["shapes"], dtype=call["dtype"], device=device)
    make = Maker(sizes_of(call["shapes"]), call["dtype"], device)
    features = together(*[maker(make) for maker in call["makers"].values()])
    # In float32 flash refuses more (test_choice.py). In float16 naive overflows, whose error the budget is made of.
    most_dropout = {FLOAT: 0.9999, HALF: 0.999}.get(call["dtype"], 1.0)
    assume(impl != "flash" or not most_dropout < features.get("dropout_p", 0.0) < 1)
    check(impl, inputs, features, causal=call["causal"])


@slow
@settings(max_examples=8)
@given(call=calls([HALF, FLOAT]))
def test_flash_with_any_features(flash_device, call):
    check_call("flash", flash_device, call)


@pytest.mark.gpu
@given(call=calls([torch.bfloat16]))
def test_flash_with_any_features_in_bfloat16(call):
    check_call("flash", torch.device("cuda"), call)


@settings(max_examples=10)
@given(call=calls([FLOAT, DOUBLE]))
def test_tiled_with_any_features(device, call):
    check_call("tiled", device, call)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("lengths", [(7, 10), (10, 7), (8, 8)])
@pytest.mark.parametrize(("scale", "with_features"), [(None, False), (-0.7, False), (0.3, True)])
def test_naive_is_what_the_arguments_say(device, lengths, causal, scale, with_features):
    """Written out for each head of q by itself; the other implementations are compared with naive."""
    shapes = Shapes.of(2, q_len=lengths[0], k_len=lengths[1], d=4, dv=3, q_heads=4, kv_heads=2)
    q, k, v, *_ = make_inputs(shapes, dtype=DOUBLE, device=device)
    make = Maker(sizes_of(shapes), DOUBLE, device)
    tensors = make.bias("hqk") | make.slopes() | make.mask("bqk") | make.sinks() if with_features else {}
    settings = {"window": (4, 2), "softcap": 0.7} if with_features else {}
    asked = {"causal": causal, "scale": scale, **tensors, **settings}
    out, lse = attention(q, k, v, **asked, impl="naive", return_lse=True)

    shift = 0 if causal == "top_left" else lengths[1] - lengths[0]
    distance = torch.arange(lengths[1], device=device) - torch.arange(lengths[0], device=device)[:, None] - shift
    seen = distance <= (0 if causal else 2 if with_features else lengths[1] + lengths[0])
    scores = q @ k.repeat_interleave(2, 1).mT * (0.5 if scale is None else scale)
    if with_features:
        seen = seen & tensors["mask"] & (distance >= -4)
        scores = 0.7 * torch.tanh(scores / 0.7) - tensors["alibi_slopes"][:, None, None] * distance.abs()
        scores = scores + tensors["bias"]
    exponentials = torch.exp(scores) * seen
    total = exponentials.sum(-1)
    if with_features:
        total = total + torch.exp(tensors["sinks"])[:, None]
    torch.testing.assert_close(lse, total.log())
    expected = exponentials @ v.repeat_interleave(2, 1) / total[..., None]
    torch.testing.assert_close(out, expected.nan_to_num(0.0))
