"""Functions of a pair within torch.compile: one graph, recorded as it is traced, and compiled once for all lengths."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention

from ..helpers import COMPILES, EVERY, compiled_once, named, one_graph, slow
from .cases import ALL, BY_TABLES, MASKS, SCORES, Rounded, assert_close, by_torch, tensors

pytestmark = COMPILES
HEADS = 4
FAST_MASKS = ("documents", "inverted", "by_distance")
FAST_SCORES = ("turned_bias", "in_place", "learned_buckets", "of_rows", "masked")
TABLE = {**SCORES, **BY_TABLES}


def in_turn(names, every=(), fast=None, among=EVERY):
    """Each name with one implementation of ``among``, which take turns, and those in ``every`` with all; ``fast`` ones
    with tiled.

    What is recorded depends on the function alone, and `test_mods` has each function with each implementation.
    """
    made = [
        (impl, name)
        for number, name in enumerate(names)
        for impl in (EVERY if name in every else [among[number % len(among)]])
    ]
    quick = [("tiled", name) for name in (every if fast is None else fast)]
    assert {*quick} <= {*made}
    rows = [pytest.param(*row, marks=[slow] * (row not in quick)) for row in made]
    return pytest.mark.parametrize(("impl", "name"), rows)


@in_turn(MASKS, FAST_MASKS)
def test_masks(impl, name):
    q, k, v = tensors()
    compiled = one_graph(lambda *qkv: attention(*qkv, mask=lambda *pair: MASKS[name](*pair), impl=impl))
    assert_close([compiled(q, k, v)], [by_torch(q, k, v, mask=MASKS[name])])


@in_turn(TABLE, FAST_SCORES)
def test_score_changes_and_all_gradients(impl, name):
    mod, inputs = TABLE[name], [*tensors(), *ALL]
    compiled = one_graph(lambda *qkv: attention(*qkv, scores=lambda s, *pair: mod(s, *pair), impl=impl))
    outs = compiled(*inputs[:3]), by_torch(*inputs[:3], score=mod)
    found, expected = (torch.autograd.grad(out.square().sum(), inputs, allow_unused=True) for out in outs)
    assert_close([outs[0], *found], [outs[1], *expected])


@pytest.mark.parametrize("impl", named(EVERY, ["tiled"]))
def test_numbers_that_change_compile_once_more(impl):
    def attend(q, table, width, factor):
        def scores(score, b, h, q_idx, kv_idx):
            return torch.where(q_idx - kv_idx < width, score * factor, table[h, kv_idx - q_idx + width + 20])

        return attention(q, q, q, mask=lambda b, h, q_idx, kv_idx: kv_idx < 3 * width, scores=scores, impl=impl)

    compiled = one_graph(attend)
    for number, numbers in enumerate(((7, 0.3), (5, 0.7), (4, 0.9), (11, -1.5))):
        inputs = [torch.randn(2, HEADS, 13, 16, requires_grad=True), torch.randn(HEADS, 60, requires_grad=True)]
        with compiled_once(number if number > 1 else 0):
            out = compiled(*inputs, *numbers)
        expected = attend(*inputs, *numbers)
        found, others = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
        torch.testing.assert_close((out, found), (expected, others), rtol=2e-5, atol=2e-5)


def test_a_function_is_compiled_again_for_other_code_and_other_captured_tensors():
    q = torch.randn(2, HEADS, 13, 16)
    compiled = one_graph(lambda q, scores, made: attention(q, q, q, scores=made(scores), impl="tiled"))

    def by_row(tensor):
        return lambda score, b, h, q_idx, kv_idx: score * tensor[h]

    def by_head(tensor):
        return lambda score, b, h, q_idx, kv_idx: score * (1 - tensor[h])

    slopes = torch.rand(HEADS)
    for made in (by_row, by_head):
        for tensor in (slopes, slopes.half(), slopes.long(), torch.rand(HEADS + 1)):
            expected = attention(q, q, q, scores=made(tensor), impl="naive")
            torch.testing.assert_close(compiled(q, tensor, made), expected, rtol=2e-5, atol=2e-5)


def branches(score, b, h, q_idx, kv_idx):
    return score if q_idx > kv_idx else -score


def by_an_unknown_operator(score, b, h, q_idx, kv_idx):
    return torch.lgamma(score)


def by_a_function(score, b, h, q_idx, kv_idx):
    return Rounded.apply(score)


def hidden(score, b, h, q_idx, kv_idx):
    return score + torch.ops.aten.mul(q_idx, 2)


def whole(score, b, h, q_idx, kv_idx):
    return score + WHOLE


def put_together(score, b, h, q_idx, kv_idx):
    return torch.stack([score, score])[0]


WHOLE, WHOLE_ROWS = torch.randn(3), torch.randn(2, 13, 5)
REFUSED = {
    branches: "ata-dependent branching",
    by_an_unknown_operator: "it uses lgamma, which kernels do not have for elements",
    whole: r"it takes a captured tensor of shape \(3,\) whole",
    lambda score, b, h, q_idx, kv_idx: score + (WHOLE_ROWS[b, kv_idx] * 2).sum(): "it uses a row of a captured tensor",
    by_a_function: "it calls Rounded, an autograd Function",
    put_together: "it puts elements together",
    lambda score, b, h, q_idx, kv_idx: score > 0: "must return a floating-point tensor; got torch.bool",
    lambda score, b, h, q_idx, kv_idx: None: "a mod must return a tensor; got NoneType",
    lambda score, b, h, q_idx, kv_idx: WHOLE[b, h]: "has more indices than the 1 axes of a captured tensor",
    lambda score, b, h, q_idx, kv_idx: WHOLE[score]: "an index must be an integer for one pair",
    lambda score, b, h, q_idx, kv_idx: score.item(): ".",
    lambda score, b, h, q_idx, kv_idx: score + int(q_idx): ".",
}


@pytest.mark.parametrize("mod", REFUSED)
def test_what_cannot_be_recorded_is_refused(mod):
    compiled = one_graph(lambda q: attention(q, q, q, scores=mod, impl="tiled"))
    with pytest.raises(RuntimeError, match=REFUSED[mod]):
        compiled(torch.randn(2, HEADS, 13, 16))


def test_an_operator_that_is_not_seen_is_none_of_captured_tensors():
    """It is computed, or refused; its value is not taken for a number."""
    q = torch.randn(2, HEADS, 13, 16)
    compiled = one_graph(lambda q: attention(q, q, q, scores=hidden, impl="tiled"))
    try:
        out = compiled(q)
    except RuntimeError as error:
        assert "does what torch.compile does not show" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(out, attention(q, q, q, scores=hidden, impl="naive"), rtol=2e-5, atol=2e-5)
