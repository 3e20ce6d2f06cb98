"""Windows, caps, slopes, biases, masks, rules, sinks and dropout, alone and together, against float64 in the budget."""

from __future__ import annotations

import pytest
import torch

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
    "trees": lambda make: make.trees(),
    "rules": lambda make: make.rules(),
    "distances": lambda make: make.distances("hd"),
    "distances_of_entries": lambda make: make.distances("bd", before=3),
    "distances_of_all": lambda make: make.distances("d", after=40),
    "distances_that_are_one": lambda make: make.distances("bh"),
    "sinks": lambda make: make.sinks(),
    "dropout": lambda make: DROPPED,
}
TOGETHER = {
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
BEYOND_A_TILE = ["window", "softcap", "alibi", "bias", "mask", "documents", "rules", "distances", "sinks", "dropout"]
FOR_EVERY_TRITON = ["softcap", "bias", "documents", "distances", "dropout"]
"""What differs in operations of Triton's; packed sequences have windows, rules and sinks."""


@slow
@pytest.mark.parametrize(
    ("lengths", "name"),
    [
        *[pytest.param((150, 130), name, id=f"more_queries-{name}") for name in BEYOND_A_TILE],
        *[
            pytest.param(
                (130, 150),
                name,
                id=f"more_keys-{name}",
                marks=[pytest.mark.every_triton] * (name in FOR_EVERY_TRITON),
            )
            for name in BEYOND_A_TILE
        ],
    ],
)
def test_lengths_beyond_a_tile(flash_device, lengths, name):
    shapes = Shapes.of(1, q_len=lengths[0], k_len=lengths[1], d=16, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, dtype=HALF, device=flash_device)
    check("flash", inputs, ALONE[name](Maker(sizes_of(shapes), HALF, flash_device)), causal="top_left")


@slow
def test_heads_wider_than_a_tile(flash_device):
    """A negative scale, which narrower heads take into q's tile, and sums that every slice's programs make."""
    shapes = Shapes.of(1, q_len=35, k_len=40, d=264, dv=520, q_heads=2, kv_heads=1)
    make = Maker(sizes_of(shapes), FLOAT, flash_device)
    features = make.bias("hqk") | make.slopes() | make.sinks() | {"window": (20, 5)}
    check("flash", make_inputs(shapes, device=flash_device), features, scale=-0.05)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right", True])
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
