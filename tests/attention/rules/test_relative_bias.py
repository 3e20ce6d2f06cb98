"""Biases by distance: what scores read, their gradients, and the example of the documentation."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.mods import score_mod
from cs336_systems.attention.variants import bias, relative_bias, softcap
from cs336_systems.kernels.triton.tiles import TileConfig, pin
from cs336_systems.testing import Shapes, evaluate, make_inputs

from ..helpers import COMPILES, EVERY, FLOATS, HALF, check, each_implementation, named, sizes_of, slow

ROOT = Path(__file__).parents[3]
SHAPES = Shapes.of(2, q_len=35, k_len=41, d=8, q_heads=4, kv_heads=2)
pytestmark = COMPILES[:1]


def table(shapes, *leading, before=0, after=0, device="cpu"):
    length = shapes.q[-2] + shapes.k[-2] - 1 + before + after
    return torch.randn(*leading, length, device=device).requires_grad_()


@pytest.mark.parametrize("impl", named([*EVERY, "compiled"], EVERY))
def test_scores_get_the_element_of_their_distance(impl, device):
    """As a bias with all that written out does, with the last query at the last key."""
    inputs, (q_len, k_len) = make_inputs(SHAPES, device=device), sizes_of(SHAPES)[2:]
    own = torch.randn(4, 2 * k_len - 1, device=device)
    shift = k_len - q_len
    distance = torch.arange(k_len, device=device) - torch.arange(q_len, device=device)[:, None] - shift
    written = attention(*inputs[:3], bias=own[:, distance + k_len - 1], impl="naive")
    out = attention(*inputs[:3], scores=relative_bias(own, k_len - 1 - shift), impl=impl)
    torch.testing.assert_close(out, written)


@each_implementation
@pytest.mark.parametrize("lengths", [(33, 33), (33, 12), (1, 40)])
def test_the_origin_is_the_middle_unless_said(impl, device, lengths):
    """One table serves all lengths up to its own."""
    q_len, k_len = lengths
    inputs = make_inputs(Shapes.of(1, q_len=q_len, k_len=k_len, d=8, q_heads=1), device=device)
    own = torch.randn(1, 2 * 40 - 1, device=device).requires_grad_()
    results = []
    for scores in (
        relative_bias(own),
        relative_bias(own, 39),
        relative_bias(own[:, 40 - q_len : 39 + k_len], q_len - 1),
    ):
        out = attention(*inputs[:3], scores=scores, impl=impl)
        results.append((out.detach(), *torch.autograd.grad(out, own, inputs.dout)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    assert not results[0][1][:, [*range(40 - q_len), *range(39 + k_len, 79)]].any()


@pytest.mark.parametrize(
    ("tiles", "lengths"),
    [((16, 64), (70, 45)), *[pytest.param(*x, marks=slow) for x in (((32, 16), (70, 45)), ((64, 32), (45, 70)))]],
)
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_tiles_of_any_size(flash_device, tiles, causal, lengths):
    shapes = Shapes.of(1, q_len=lengths[0], k_len=lengths[1], d=16, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, dtype=HALF, device=flash_device)
    features = {"window": (20, None), "scores": relative_bias(table(shapes, 2, device=flash_device), lengths[0] - 1)}
    with pin(dq=TileConfig(*tiles, 4, 1)):
        check("flash", inputs, features, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
@pytest.mark.parametrize(("lengths", "window"), [((260, 515), None), ((500, 350), (100, None)), ((300, 300), None)])
def test_diagonals_of_many_tiles(lengths, window, d, dtype):
    """Every tile that the table of configurations has."""
    shapes = Shapes.of(2, q_len=lengths[0], k_len=lengths[1], d=d, q_heads=4, kv_heads=2)
    inputs = make_inputs(shapes, dtype=dtype, device="cuda")
    features = {"window": window, "scores": relative_bias(table(shapes, 4, device="cuda"), lengths[0] - 1)}
    for causal in (False, True):
        check("flash", inputs, features, causal=causal)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_gradients_are_the_same_on_every_run(impl, device):
    inputs = make_inputs(SHAPES, device=device)
    features = {"scores": relative_bias(table(SHAPES, 1, device=device), 34) + softcap(2.0)}
    first, second = (evaluate(partial(attention, impl=impl), inputs, features) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_several_tables(impl, device):
    """And one that two rules captured: autograd adds up what it gets from each."""
    inputs = make_inputs(SHAPES, device=device)
    own, other = table(SHAPES, 4, device=device), table(SHAPES, 2, 1, before=2, device=device)
    full = torch.randn(1, 1, 35, 41, device=device).requires_grad_()
    made = relative_bias(own, 34) + softcap(1.5) + relative_bias(other, 36) + bias(full)
    check(impl, inputs, {"scores": made}, causal=True)
    outs, gradients = [], []
    for scores in (relative_bias(own, 34) + relative_bias(own, 34), relative_bias(2 * own, 34)):
        outs.append(attention(*inputs[:3], scores=scores, impl=impl))
        gradients += torch.autograd.grad(outs[-1], own, inputs.dout)
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_a_table_may_hide_distances(impl, device):
    """Some of them, or all: then no query sees anything."""
    inputs, distance = make_inputs(SHAPES, device=device), torch.arange(-34, 41, device=device)
    hidden = (distance > 1) | (distance < -3) & (distance >= -20)
    own = torch.randn(4, 75, device=device).masked_fill(hidden, -math.inf).requires_grad_()
    assert not check(impl, inputs, {"scores": relative_bias(own, 34)})["dscores_0"][..., hidden].any()
    nothing = torch.full((1, 75), -math.inf, device=device).requires_grad_()
    assert not check(impl, inputs, {"scores": relative_bias(nothing, 34)})["out"].any()


@pytest.mark.parametrize("impl", named(["flash", "tiled"], ["tiled"]))
def test_a_function_of_ones_own_by_distance(impl, device):
    rates = torch.rand(4, 80, device=device).requires_grad_()
    steered = score_mod(lambda score, b, h, q_idx, kv_idx: score + score.tanh() * rates[h, kv_idx - q_idx + 36])
    scores = softcap(3.0) + steered + softcap(2.0)
    check(impl, make_inputs(SHAPES, device=device), {"scores": scores}, causal="top_left")


def t5_of_the_docs():
    """The functions of the documentation's example, as they stand there."""
    text = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    [example] = [part for part in text.split("```python\n") if "def bucket(" in part]
    names = {"attention": attention}
    exec(compile(example.split("```")[0], "docs/features.md", "exec"), names)
    return names["bucket"], names["t5_bias"]


def test_buckets_of_the_docs_are_t5s():
    bucket, _ = t5_of_the_docs()
    distances = torch.tensor([0, -1, -7, -8, -11, -12, -15, -16, -22, -23, -90, -91, -1000, 1, 7, 8, 12, 90, 91, 128])
    expected = torch.tensor([0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 14, 15, 15, 17, 23, 24, 25, 30, 31, 31])
    assert torch.equal(bucket(distances), expected)


@each_implementation
def test_t5_as_the_docs_say(impl, device):
    inputs = make_inputs(SHAPES, device=device)
    weights = torch.randn(4, 32, device=device).requires_grad_()
    bucket, t5_bias = t5_of_the_docs()
    q, k, v = inputs[:3]
    distance = torch.arange(41, device=device) - torch.arange(35, device=device)[:, None]
    outs = [
        attention(q, k, v, scores=t5_bias(weights, 35, 41), scale=1.0, impl=impl),
        attention(q, k, v, bias=weights[:, bucket(distance)], scale=1.0, impl="naive"),
    ]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*[torch.autograd.grad(out, weights, inputs.dout)[0] for out in outs])
