"""Compiled models that pass attention a mask_mod or score_mod: one graph for all lengths, and what recompiles."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import attention, attention_varlen, score_statistics
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.variants import block_local, dilated, window
from cs336_systems.compat.flex_attention import create_block_mask, flex_attention

from ..helpers import COMPILES, compiled_once, one_graph, slow
from .test_compiled_mods import HEADS, in_turn

pytestmark = COMPILES


def assert_alike(compiled, model, inputs):
    """The same values, and gradients of the inputs and of the parameters."""
    inputs = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    leaves, outs = [*inputs.values(), *model.parameters()], [attend(**inputs) for attend in (compiled, model)]
    dout = torch.randn_like(outs[0])
    gradients = [torch.autograd.grad(x, leaves, dout, allow_unused=True, materialize_grads=True) for x in outs]
    torch.testing.assert_close((outs[0], gradients[0]), (outs[1], gradients[1]), rtol=2e-5, atol=2e-5)


def mask_of_the_module(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (q_idx < 3)


def halved(score, b, h, q_idx, kv_idx):
    return score * 0.5


class Model(nn.Module):
    def __init__(self, impl):
        super().__init__()
        self.impl, self.width, self.factor = impl, 7, 0.3
        self.slopes, self.table = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.randn(HEADS, 99))
        self.register_buffer("ids", torch.arange(99) // 5)
        self.by_slopes = lambda score, b, h, q_idx, kv_idx: score + self.slopes[h] * (kv_idx - q_idx)

    def as_alibi(self, score, b, h, q_idx, kv_idx):
        return score - self.slopes.exp()[h] * (q_idx - kv_idx).abs()

    def attend(self, q, k, v, mask, scores):
        return attention(q, k, v, mask=mask, scores=scores, impl=self.impl)


class OfTheModule(Model):
    def forward(self, q, k, v):
        return self.attend(q, k, v, mask_of_the_module, halved)


class Attribute(Model):
    def forward(self, q, k, v):
        return self.attend(q, k, v, mask_of_the_module, self.by_slopes)


class Method(Model):
    def forward(self, q, k, v):
        return self.attend(q, k, v, None, self.as_alibi)


class Closure(Model):
    def forward(self, q, k, v):
        q_len, shift = q.shape[-2], k.shape[-2] - q.shape[-2]
        ids, width = self.get_buffer("ids")[: k.shape[-2]], self.width

        def mask(b, h, q_idx, kv_idx):
            seen = (q_idx + shift >= kv_idx) & (ids[q_idx + shift] == ids[kv_idx])
            return seen | ((q_idx - kv_idx).abs() < width)

        def scores(score, b, h, q_idx, kv_idx):
            biased = score + self.table[h, kv_idx - q_idx + q_len - 1] * self.factor
            return biased - self.slopes[h] * (q_idx + shift - kv_idx).abs()

        return self.attend(q, k, v, mask, scores)


class Several(Model):
    """Each has rules that no call before it had."""

    def forward(self, q, k, v):
        for number in (1, 2):
            q = self.attend(
                q, k, v, lambda b, h, q_idx, kv_idx, number=number: (q_idx + kv_idx) % 5 != number, self.as_alibi
            )
        return self.attend(q, k, v, None, lambda score, b, h, q_idx, kv_idx: torch.sin(score * self.slopes[h]))


class Made(Model):
    def forward(self, q, k, v):
        partial = functools.partial(lambda slopes, score, b, h, q_idx, kv_idx: score + slopes[h], self.slopes)
        mask = mask_mod(mask_of_the_module) | window(2, 2)
        other = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx != 1)
        return self.attend(q, k, v, mask.inverted() | other, score_mod(partial) + score_mod(halved))


class Numbers(Model):
    """Tensors that are made within a function, of numbers."""

    def forward(self, q, k, v):
        def scores(score, b, h, q_idx, kv_idx):
            far = torch.where(q_idx > 2, score, torch.tensor(-2.0)) + torch.zeros((), device=score.device)
            whole = (q_idx - kv_idx).to(score.dtype).float() * self.slopes[h]
            return far + whole + torch.zeros_like(score) + score.new_full((), 2.0) * self.slopes[2]

        return self.attend(q, k, v, lambda b, h, q_idx, kv_idx: torch.ones((), dtype=torch.bool), scores)


class Flex(Model):
    def forward(self, q, k, v):
        out, lse = flex_attention(q, k, v, score_mod=self.by_slopes, return_lse=True)
        return out + lse[..., None]


class Statistics(Model):
    def forward(self, q, k, v):
        return score_statistics(q, k, mask=mask_of_the_module, scores=self.by_slopes, impl="tiled").entropy


class Packed(Model):
    def forward(self, q, k, v):
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        starts = (torch.arange(len(x) + 1) * x.shape[-2] for x in (q, k))
        return attention_varlen(*packed, *starts, mask=mask_of_the_module, scores=self.by_slopes, impl=self.impl)


class Checkpointed(Model):
    """A region within the region: functions are recorded before it."""

    def forward(self, q, k, v):
        scores = score_mod(self.by_slopes)
        return checkpoint(lambda *qkv: self.attend(*qkv, None, scores), q, k, v, use_reentrant=False)


FORMS = (OfTheModule, Attribute, Method, Several, Closure, Flex, Made, Numbers, Packed, Statistics, Checkpointed)
BY_NAME = {form.__name__: form for form in FORMS}


# To trace naive for all lengths takes longest: it is part of the graph, and the others are operators in it.
@in_turn(BY_NAME, ["Closure"], ["Closure", "Several", "Flex"], among=("flash", "tiled"))
def test_one_graph_for_all_lengths(impl, name):
    """Where the function is of the module, an attribute, or made within; other lengths and tensors compile nothing."""
    form = BY_NAME[name]
    model = form(impl)
    compiled = one_graph(model, dynamic=True)
    for number, (batch, q_len, k_len) in enumerate(((2, 9, 9), (2, 6, 11), (3, 21, 32))):
        shapes = {"q": (batch, HEADS, q_len, 16), "k": (batch, HEADS, k_len, 16), "v": (batch, HEADS, k_len, 16)}
        if form is Several:
            shapes["k"] = shapes["v"] = shapes["q"]
        inputs = {name: torch.randn(shape) for name, shape in shapes.items()}
        with compiled_once(number if number > 1 else 0):  # the first one is for equal lengths
            assert_alike(compiled, model, inputs)
        with torch.no_grad():
            model.slopes.add_(0.5)


def test_nothing_is_compiled_for_rules_of_others():
    model = Closure("tiled")
    compiled = one_graph(model)
    for number in range(2):
        with compiled_once(number):
            assert_alike(compiled, model, {name: torch.randn(2, HEADS, 13, 16) for name in "qkv"})
        score_mod(lambda score, b, h, q_idx, kv_idx: torch.cos(score * 3.25) * q_idx)
        one_graph(lambda q: attention(q, q, q, scores=lambda s, b, h, q_idx, kv_idx: torch.exp(s), impl="tiled"))(
            torch.randn(5, 16)
        )


@slow
def test_code_generated_from_the_graph():
    model = Closure("tiled")
    compiled = one_graph(model, backend="inductor")
    for number, length in enumerate((13, 17, 29)):
        with compiled_once(number if number > 1 else 0):
            assert_alike(compiled, model, {name: torch.randn(2, HEADS, length, 16) for name in "qkv"})


@slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
def test_export_records_functions_if_it_is_strict():
    model = Closure("tiled")
    inputs = {name: torch.randn(2, HEADS, 13, 16) for name in "qkv"}
    assert_alike(torch.export.export(model, (), inputs, strict=True).module(), model, inputs)
    with pytest.raises(TypeError, match=r"score_mod cannot be called where torch\.export traces with strict=False"):
        torch.export.export(model, (), inputs, strict=False)


def test_lists_of_blocks_are_found_before():
    def attend(q):
        block_mask = create_block_mask(mask_of_the_module, None, None, 13, 13)
        return flex_attention(q, q, q, block_mask=block_mask)

    q = torch.randn(2, HEADS, 13, 16)
    with pytest.raises(RuntimeError, match=r"lists of blocks cannot be found where torch\.compile traces"):
        one_graph(attend)(q)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(q), attend(q))


@slow
def test_a_block_mask_that_was_made_before_and_a_score_mod_within():
    block_mask = create_block_mask(mask_of_the_module, None, None, 13, 13)

    class Blocks(Model):
        def forward(self, q, k, v):
            return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * self.slopes[h], block_mask=block_mask)

    model = Blocks("auto")
    assert_alike(one_graph(model), model, {name: torch.randn(2, HEADS, 13, 16) for name in "qkv"})


class Divided(nn.Module):
    """Masks whose functions divide."""

    def forward(self, q, k, v):
        return attention(q, k, v, mask=dilated(3) | block_local(4), impl="tiled")


@pytest.mark.parametrize("strict", [False, True])
def test_masks_that_divide_are_exported(strict):
    model, inputs = Divided(), {name: torch.randn(2, HEADS, 13, 16) for name in "qkv"}
    assert_alike(torch.export.export(model, (), inputs, strict=strict).module(), model, inputs)
