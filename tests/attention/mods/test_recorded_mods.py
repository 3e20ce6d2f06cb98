"""When a function of a pair is recorded, and what is kept of it."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch

from cs336_systems.attention import attention, dispatch, mods
from cs336_systems.attention.mods import mask_mod
from cs336_systems.kernels.mods import registry

from .cases import IDS, LEARNED, MASKS, SLOPES, TURNED, assert_close, by_torch, tensors


def recorded(monkeypatch, name="record"):
    """How often functions are recorded from here on."""
    calls = []
    monkeypatch.setattr(mods, name, lambda *arguments, made=mods.record: (calls.append(1), made(*arguments))[1])
    return calls


def test_a_function_is_recorded_again_when_its_names_stand_for_something_else(monkeypatch):
    width, ids, calls = 5, IDS, recorded(monkeypatch)

    def mod(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < width) & (ids[b, q_idx] == helper(ids, b, kv_idx))

    def first_helper(ids, b, at):
        return ids[b, at]

    helper = first_helper

    def check(mod, count):
        q, k, v = (x.detach() for x in tensors())
        assert_close([attention(q, k, v, mask=mod, impl="tiled")], [by_torch(q, k, v, mod)])
        assert len(calls) == count

    check(mod, 1)
    check(mod, 1)
    width = 7
    check(mod, 2)
    ids = IDS.clone()
    ids[:, 3:9] = 1
    check(mod, 2)
    ids = IDS.int()
    check(mod, 3)
    helper = lambda ids, b, at: ids[b, at] * 0 + 1  # noqa: E731
    check(mod, 4)
    partial = functools.partial(lambda number, b, h, q, k: (q + number) % 3 != k % 3, 1)
    check(partial, 5)
    check(partial, 5)
    # What may change unseen is recorded at each call.
    box = [2]
    listed = made_of(box)
    for count, value in ((6, 3), (7, 4)):
        box[0] = value
        check(listed, count)


def made_of(box):
    return lambda b, h, q, k: q - k < box[0]


def made_anew(slopes, weights, ids, same):
    def mod(s, b, h, q, k):
        return s - slopes[h] * (q - k).abs() + weights[h, ids[b, k] + same[b, k] * 2] + TURNED[k, q, h]

    return mod


def test_a_function_that_is_made_anew_is_recorded_once(monkeypatch):
    calls = recorded(monkeypatch)
    for number in (1, 2, 3):
        slopes, weights = (x.detach().mul(number).requires_grad_() for x in (SLOPES, LEARNED))
        ids = (IDS + number) % 3
        inputs = [*tensors(), slopes, weights, TURNED]
        # Two names of one tensor are not two names of two.
        mod = made_anew(slopes, weights, ids, ids if number < 3 else ids * 0 + 1)
        outs = attention(*inputs[:3], scores=mod, impl="tiled"), by_torch(*inputs[:3], score=mod)
        found, expected = (torch.autograd.grad(out.square().sum(), inputs) for out in outs)
        assert_close([outs[0], *found], [outs[1], *expected])
        assert len(calls) == (1 if number < 3 else 2)


def test_no_tensor_is_kept_alive_and_few_numbers_are():
    ids = IDS.clone()
    alive = weakref.ref(ids)
    for width in range(70):
        mask_mod(lambda b, h, q, k, ids=ids, width=width: (ids[b, q] == ids[b, k]) | (q - k < width))
    assert any(0 < len(known) <= 64 for known in mods.kept.__globals__["_kept"].values())
    assert all(len(known) <= 64 for known in mods.kept.__globals__["_kept"].values())
    del ids
    gc.collect()
    assert alive() is None


def test_what_is_computed_of_captured_tensors_is_computed_in_each_call(monkeypatch):
    calls, slopes = recorded(monkeypatch), SLOPES.detach().clone().requires_grad_()

    def mod(s, b, h, q, k):
        return s - slopes.exp()[h] * (q - k).abs() / 10

    for count in (1, 2):
        q, k, v = tensors()
        outs = attention(q, k, v, scores=mod, impl="tiled"), by_torch(q, k, v, score=mod)
        gradients = [torch.autograd.grad(out.square().sum(), slopes)[0] for out in outs]
        assert_close([outs[0], gradients[0]], [outs[1], gradients[1]])
        assert len(calls) == count
        with torch.no_grad():
            slopes += 0.5


def test_equal_functions_share_a_plan_whatever_their_numbers(no_plans):
    q, k, v = (x.detach() for x in tensors())
    for width in (5, 9):
        attention(q, k, v, mask=lambda b, h, q, k, width=width: q - k < width, impl="tiled")
    windows = [mask_mod(lambda b, h, q, k, width=width: q - k < width).expression for width in (5, 9)]
    assert windows[0][0] == windows[1][0]
    assert [expression[1] for expression in windows] == [(5,), (9,)]
    assert len(dispatch.plans) == 2
    attention(q, k, v, mask=lambda b, h, q, k: q - k < 9, impl="tiled")
    assert len(dispatch.plans) == 2


def test_a_rule_is_made_again_from_its_name():
    mask = mask_mod(MASKS["documents"])
    q, k, v = tensors()
    before = attention(q, k, v, mask=mask, impl="tiled")
    registry.pop(mask.expression[0])
    assert torch.equal(attention(q, k, v, mask=mask, impl="tiled"), before)
    with pytest.raises(SyntaxError):
        registry["no such rule"]
