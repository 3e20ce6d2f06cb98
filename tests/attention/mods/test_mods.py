"""Masks and score changes as plain functions of a pair: every implementation computes what torch computes of them."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention, attention_varlen, dispatch
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.rules import Mask, Scores
from cs336_systems.attention.variants import causal
from cs336_systems.kernels import bound_mods
from cs336_systems.kernels.mods import far_code_of, registry

from ..helpers import each_implementation
from .cases import (
    ALL,
    BATCH,
    BUCKETS,
    BY_ROWS,
    BY_TABLES,
    DIM,
    IDS,
    LEARNED,
    LENGTH,
    MASKS,
    MASKS_BY_ROWS,
    SCORES,
    SLOPES,
    TABLE,
    TURNED,
    assert_close,
    by_torch,
    tensors,
)


@each_implementation
@pytest.mark.parametrize("name", [*MASKS, *MASKS_BY_ROWS])
def test_masks(impl, name):
    q, k, v = tensors()
    mask = {**MASKS, **MASKS_BY_ROWS}[name]
    assert_close([attention(q, k, v, mask=mask, impl=impl)], [by_torch(q, k, v, mask=mask)])


@each_implementation
@pytest.mark.parametrize("name", [*SCORES, *BY_TABLES, *BY_ROWS])
def test_score_changes_and_all_gradients(impl, name):
    mod = {**SCORES, **BY_TABLES, **BY_ROWS}[name]
    inputs = [*tensors(), *ALL]
    expected = by_torch(*inputs[:3], mask=MASKS["window"], score=mod)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, inputs, dout, allow_unused=True)
    out = attention(*inputs[:3], mask=MASKS["window"], scores=mod, impl=impl)
    found = torch.autograd.grad(out, inputs, dout.float(), allow_unused=True)
    assert_close([out, *found], [expected, *gradients])


def test_kernels_for_longer_sequences_convert_the_distances_themselves(monkeypatch):
    """Whose ends float32 cannot hold. That of a small call is the same."""
    inputs = [*tensors(), *ALL]

    def results():
        out = attention(*inputs[:3], scores=SCORES["alibi"], impl="flash")
        return out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True)

    near = results()
    monkeypatch.setattr(bound_mods, "NEAR", LENGTH - 1)
    far_code_of.cache_clear()
    dispatch.clear_plans()
    far = results()
    dispatch.clear_plans()
    assert far_code_of.cache_info().misses == 1
    torch.testing.assert_close(far, near)


def test_a_score_mod_that_was_made_before_a_gradient_was_needed():
    weights = LEARNED.detach().clone()
    scores = score_mod(lambda s, b, h, q, k: s + weights[h, IDS[b, q] + IDS[b, k]])
    weights.requires_grad_()
    for impl in ("flash", "tiled", "naive"):
        with pytest.raises(ValueError, match="made again: the score_mod was made when a tensor that it reads"):
            attention(*tensors(), scores=scores, impl=impl)
        with torch.no_grad():
            attention(*tensors(), scores=scores, impl=impl)


def test_packed_sequences_have_bounds_for_what_is_gathered():
    q, k, v = (torch.randn(20, 2, DIM) for _ in range(3))
    starts = torch.tensor([0, 7, 20])

    def mod(s, b, h, q, k):
        return s + LEARNED[h, BUCKETS[k - q + LENGTH]]

    with pytest.raises(ValueError, match="max_seqlen_q and max_seqlen_k must be given for what scores captured"):
        attention_varlen(q, k, v, starts, scores=mod, impl="tiled")
    alone = attention(*(x[None, 7:].transpose(1, 2) for x in (q, k, v)), scores=mod)
    for impl in ("flash", "tiled", "naive"):
        out = attention_varlen(q, k, v, starts, scores=mod, max_seqlen_q=13, max_seqlen_k=13, impl=impl)
        torch.testing.assert_close(out[7:], alone[0].transpose(0, 1), rtol=2e-5, atol=2e-5)


def test_a_mod_is_a_mask_or_a_score_change_that_combines_with_others():
    mask, scores = mask_mod(lambda b, h, q, k: IDS[b][q] == IDS[b][k]), score_mod(SCORES["alibi"])
    assert isinstance(mask, Mask)
    assert isinstance(scores, Scores)
    q, k, v = tensors()
    out = attention(q, k, v, mask=mask & causal(), scores=scores + score_mod(SCORES["softcap"]))
    both = by_torch(q, k, v, MASKS["documents"], lambda *pair: SCORES["softcap"](SCORES["alibi"](*pair), *pair[1:]))
    assert_close([out], [both])
    listed = mask.with_blocks(LENGTH, LENGTH)
    assert listed.blocks is not None
    assert listed.blocks.rows.shape[0] == BATCH
    assert_close(
        [attention(q, k, v, mask=listed, impl="flash")], [by_torch(q, k, v, lambda b, h, q, k: IDS[b, q] == IDS[b, k])]
    )


@pytest.mark.parametrize("name", ["by_distance_backwards", "turned_bias", "by_distance", "alibi"])
def test_later_elements_and_gradients_are_those_of_the_captured_tensor(name):
    """Whatever was known when a function was first seen, and without it being seen again."""
    leaf = {"turned_bias": TURNED, "alibi": SLOPES}.get(name, TABLE)
    with torch.no_grad():
        scores = score_mod(SCORES[name])
    for _ in range(2):
        q, k, v = tensors()
        outs = attention(q, k, v, scores=scores, impl="tiled"), by_torch(q, k, v, score=SCORES[name])
        gradients = [torch.autograd.grad(out.square().sum(), leaf)[0] for out in outs]
        assert_close([outs[0], gradients[0]], [outs[1], gradients[1]])
        with torch.no_grad():
            leaf += 0.25


@pytest.mark.parametrize("surrounded", [torch.no_grad, torch.inference_mode])
def test_without_gradients(surrounded):
    with surrounded():
        q, k, v = tensors()
        found = attention(q, k, v, mask=MASKS["window"], scores=SCORES["softcap"], impl="tiled")
        assert_close([found], [by_torch(q, k, v, MASKS["window"], SCORES["softcap"])])


@pytest.mark.parametrize("impl", ["tiled", "naive"])
def test_within_transforms(impl):
    q, k, v = (x.detach() for x in tensors())

    def loss(q, attend):
        return attend(q).square().sum()

    def attend(q):
        return attention(q, k, v, mask=MASKS["window"], scores=SCORES["alibi"], impl=impl)

    found = torch.func.grad(loss)(q, attend)
    expected = torch.func.grad(loss)(q, lambda q: by_torch(q, k, v, MASKS["window"], SCORES["alibi"]))
    assert_close([found], [expected])
    both = torch.func.vmap(attend)(torch.stack([q, 2 * q]))
    assert_close(both, [by_torch(x, k, v, MASKS["window"], SCORES["alibi"]) for x in (q, 2 * q)])


@pytest.mark.parametrize("impl", ["flash", "tiled", "naive"])
def test_what_is_captured_may_be_transformed(impl):
    q, k, v = (x.detach() for x in tensors())

    def loss(attend, slopes):
        return attend(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()).square().sum()

    def ours(score):
        return attention(q, k, v, scores=score, impl=impl)

    def theirs(score):
        return by_torch(q, k, v, score=score)

    slopes = SLOPES.detach()
    found = torch.func.grad(lambda slopes: loss(ours, slopes))(slopes)
    assert_close([found], [torch.func.grad(lambda slopes: loss(theirs, slopes))(slopes)])
    several = torch.stack([slopes, 2 * slopes])
    found = torch.func.vmap(lambda slopes: loss(ours, slopes))(several)
    assert_close(found / 1e3, [loss(theirs, each) / 1e3 for each in several])


def test_a_default_device_and_dtype_change_nothing():
    q, k, v = tensors()
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        scores = score_mod(SCORES["clamped"])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert_close([attention(q, k, v, scores=scores)], [by_torch(q, k, v, score=SCORES["clamped"])])


@each_implementation
def test_grouped_heads_and_another_length(impl):
    generator = torch.Generator().manual_seed(4)
    sizes = (4, 20), (2, 33), (2, 33)
    q, k, v = (torch.randn(BATCH, *size, DIM, generator=generator, requires_grad=True) for size in sizes)

    def score(s, b, h, q, k):
        return s * SLOPES[h] + LEARNED[h, (k - q).clamp(-3, 5) + 3]

    def mask(b, h, q, k):
        return (k - q <= 13) & (h + b != 2)

    inputs = [q, k, v, SLOPES, LEARNED]
    out = attention(q, k, v, scores=score, mask=mask, impl=impl)
    entries, heads = torch.arange(BATCH).view(-1, 1, 1, 1), torch.arange(4).view(-1, 1, 1)
    places = entries, heads, torch.arange(20)[:, None], torch.arange(33)
    wide = [x.double() for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))]
    scores = score(wide[0] @ wide[1].mT / DIM**0.5, *places)
    scores = scores.masked_fill(~mask(*places), float("-inf"))
    blind = (scores == float("-inf")).all(-1, keepdim=True)
    expected = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ wide[2]
    found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, expected))
    assert_close([out, *found], [expected, *wanted])
    alone = attention(q[:, 0], k[:, 0], v[:, 0], scores=score, mask=lambda b, h, q, k: k - q <= 13, impl=impl)
    shared = attention(q[:, :1], k[:, :1], v[:, :1], scores=score, mask=lambda b, h, q, k: k - q <= 13, impl=impl)
    torch.testing.assert_close(alone, shared[:, 0])


@each_implementation
@pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
@pytest.mark.parametrize("mod", [lambda s: s.abs().sqrt(), lambda s: s / s.abs() + s, lambda s: s.abs().log()])
def test_derivatives_that_are_not_finite_at_0(impl, mod):
    """The score of pairs that fill tiles up, and do not exist, is 0."""
    q, k, v = tensors()
    factors = torch.rand(4, requires_grad=True)
    results = [
        attention(*inputs, scores=lambda s, b, h, q, k: mod(s) * factors[h], impl=name)
        for inputs, name in (((q, k, v), impl), ((q.double(), k.double(), v.double()), "naive"))
    ]
    found, expected = (torch.autograd.grad(out.square().sum(), (q, k, v, factors)) for out in results)
    for own, other in zip((results[0], *found), (results[1], *expected), strict=True):
        assert (own - other).norm() <= 1e-3 * other.norm(), "near 0 a rounding of the score changes the derivative"


def test_which_rules_may_make_nan_of_a_score_of_0():
    def is_singular(mod):
        return registry[score_mod(mod).expression[0][0]].is_singular

    assert is_singular(lambda s, b, h, q, k: s.abs().sqrt())
    assert is_singular(lambda s, b, h, q, k: s / s.abs())
    assert is_singular(lambda s, b, h, q, k: s * s.rsqrt())
    assert is_singular(lambda s, b, h, q, k: s + (q - k).abs().float().log())
    assert is_singular(lambda s, b, h, q, k: s / SLOPES[h])
    assert not is_singular(lambda s, b, h, q, k: s.tanh() / 3 + s.sigmoid() * SLOPES[h] - (q - k) / 7)
    assert not any(map(is_singular, (SCORES["alibi"], SCORES["turned_bias"], SCORES["halved"])))


def test_axes_are_seen_from_the_indices():
    def axes(mod):
        return registry[score_mod(mod).expression[0][0]].axes

    assert axes(SCORES["alibi"]) == {0: ("head",)}
    assert axes(SCORES["turned_bias"]) == {0: ("head", "row", "column")}
    assert axes(SCORES["by_distance_backwards"]) == {0: ("head", "distance")}
    assert axes(SCORES["learned_number"]) == {0: (), 1: ("row",), 2: ("column",)}
    assert axes(BY_TABLES["learned_buckets"]) == axes(BY_TABLES["clamped_distances"]) == {0: ("head", "distance")}
    assert axes(BY_TABLES["of_rows"]) == {0: ("row",), 1: ("batch", "head", "row")}
    assert axes(BY_TABLES["of_columns"]) == {0: ("batch", "column")}
    assert axes(BY_TABLES["of_pairs"]) == {0: ("batch", "head", "row", "column"), 1: ("row", "column")}
    steepness = {name: registry[score_mod(mod).expression[0][0]].steepest for name, mod in SCORES.items()}
    assert (steepness["alibi"], steepness["halved"], steepness["squared_and_biased"]) == (1.0, 1.5, 1024.0)


@each_implementation
def test_packed_sequences_count_from_where_they_begin(impl):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(20, 2, DIM, generator=generator) for _ in range(3))
    starts, tags = torch.tensor([0, 7, 20]), torch.tensor([3, 5])
    mod = lambda s, b, h, q, k: s - (q - k).abs() * tags[b] / 10  # noqa: E731
    out = attention_varlen(q, k, v, starts, mask=lambda b, h, q, k: q >= k, scores=mod, impl=impl)
    for number, (first, stop) in enumerate(((0, 7), (7, 20))):
        own = (x[None, first:stop].transpose(1, 2) for x in (q, k, v))
        alone = attention(*own, causal=True, scores=lambda s, b, h, q, k, n=number: s - (q - k).abs() * tags[n] / 10)
        torch.testing.assert_close(out[first:stop], alone[0].transpose(0, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("compile_afresh")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore:The .grad attribute of a Tensor:UserWarning",
)
@pytest.mark.parametrize(("impl", "name"), [("tiled", "learned_buckets"), ("naive", "alibi")])
def test_what_was_traced_before_is_for_torch_compile_too(impl, name):
    mod = {**SCORES, **BY_TABLES}[name]
    mask, scores = mask_mod(MASKS["documents"]), score_mod(mod)
    compiled = torch.compile(lambda *qkv: attention(*qkv, mask=mask, scores=scores, impl=impl), fullgraph=True)
    inputs = [*tensors(), LEARNED, SLOPES]
    outs = compiled(*inputs[:3]), by_torch(*inputs[:3], MASKS["documents"], mod)
    found, expected = (torch.autograd.grad(out.square().sum(), inputs, allow_unused=True) for out in outs)
    assert_close([outs[0], *found], [outs[1], *expected])
