"""Masks and score changes as plain functions of a pair: every implementation computes what torch computes of them."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from cs336_systems.attention import attention, attention_varlen, dispatch, mods
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.rules import Mask, Scores
from cs336_systems.attention.variants import causal
from cs336_systems.kernels import bound_mods
from cs336_systems.kernels.mods import far_code_of, registry

from ..helpers import each_implementation

BATCH, HEADS, LENGTH, DIM = 2, 4, 45, 8
SIZES = (BATCH, HEADS, LENGTH, LENGTH)
PLACES = [torch.arange(size).view([-1 if axis == own else 1 for axis in range(4)]) for own, size in enumerate(SIZES)]


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), requires_grad=True)


IDS = torch.randint(0, 4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[True] * 30 + [False] * 15, [True] * 45])
NEAR, PARTS = torch.arange(2 * LENGTH - 1) % 5 != 2, torch.tensor([7, 11])
BUCKETS = torch.randint(0, 9, (2 * LENGTH,), generator=torch.Generator().manual_seed(1))
SLOPES, TABLE, BIAS, SCALAR = (
    leaf(HEADS),
    leaf(HEADS, 2 * LENGTH - 1),
    leaf(*SIZES),
    torch.tensor(0.7, requires_grad=True),
)
ROWS, LONG, LEARNED = leaf(LENGTH), leaf(LENGTH + 7), leaf(HEADS, 9)
TURNED = leaf(LENGTH, LENGTH, HEADS)
ENDS = (torch.arange(LENGTH) % 5 / 4 - 0.5).requires_grad_()
ALL = [SLOPES, TABLE, BIAS, SCALAR, ROWS, LONG, LEARNED, ENDS]
WIDE = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
TRIPLES = leaf(BATCH, HEADS, LENGTH, 3)
CHOSEN = torch.randint(0, 6, (BATCH, LENGTH, 3), generator=torch.Generator().manual_seed(2))
ALL += [TURNED, WIDE, TRIPLES]

MASKS = {
    "documents": lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k]),
    "window": lambda b, h, q, k: (q - k < 17) & (q >= k),
    "of_some_heads": lambda b, h, q, k: (q >= k) | (h % 2 == 0),
    "blocks": lambda b, h, q, k: (q // 16 == k // 16) | ((q - k) % 7 == 0),
    "rounds_down": lambda b, h, q, k: (k - q) // 5 >= -3,
    "rounds_down_by_powers": lambda b, h, q, k: ((q - k) % 8 < 5) | ((k - q) // 4 == h),
    "inverted": lambda b, h, q, k: ~((q - k).abs() < 3) & torch.logical_not(q == 40),
    "everything": lambda b, h, q, k: h >= 0,
    "padded_keys": lambda b, h, q, k: PADDED[b, k],
    "chosen": lambda b, h, q, k: torch.where(h > 1, q >= k, True) & torch.where(q > 20, k % 2 == 0, q < 2**30),
    "products": lambda b, h, q, k: (q * 2**27 + k) % 5 != (k * 2**28 - q) % 3,
    "by_distance": lambda b, h, q, k: NEAR[q - k + LENGTH - 1] & (q // PARTS[b] >= k // PARTS[b]),
    "of_the_first_entry": lambda b, h, q, k: PADDED[0, k] ^ (q < k),
    "shifted": lambda b, h, q, k: ((q << 27) >> 3) % 5 >= ((k - 9) >> 1) % 4,
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "softcap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
    "by_distance": lambda s, b, h, q, k: s + TABLE[h, k - q + LENGTH - 1],
    "by_distance_backwards": lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH - 1],
    "halved": lambda s, b, h, q, k: torch.where(q > k, s, s * 0.5) - (q - k).abs() * 0.01,
    "squared_and_biased": lambda s, b, h, q, k: s * s * 0.1 + BIAS[b, h, q, k],
    "turned_bias": lambda s, b, h, q, k: s + TURNED[k, q, h],
    "learned_number": lambda s, b, h, q, k: s * SCALAR + ROWS[q] * ROWS[k],
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.4) ** 2 + torch.sigmoid(s) * torch.exp(-(q - k).abs() / 8),
    "without_the_score": lambda s, b, h, q, k: SLOPES[h] * 1.0,
    "of_a_computed_tensor": lambda s, b, h, q, k: s - SLOPES.exp()[h] * (q - k).abs() / 10,
    "largest": lambda s, b, h, q, k: torch.maximum(s, ROWS[q] * 0.3).abs(),
    "at_the_ends": lambda s, b, h, q, k: (
        s * ENDS[q].clamp(-0.5, 0.25) + torch.relu(ENDS[k]) + torch.maximum(ENDS[k], 0.25 - s * 0) + ENDS[q].abs()
    ),
    "longer_than_the_call": lambda s, b, h, q, k: s + LONG[k],
    "powers": lambda s, b, h, q, k: s - 2 ** (-2.0 * (h + 1)) * (q - k).abs() + 0.5 ** (q % 3) + (q - k + 0.5) ** -2,
    "of_floats": lambda s, b, h, q, k: s + (q / 7) % 2.5 - (k / 3) // 2 + torch.div(q, 4, rounding_mode="floor"),
    "activations": lambda s, b, h, q, k: (
        F.gelu(s) + F.gelu(s + ROWS[q], approximate="tanh") + F.silu(ROWS[k] - s) + F.leaky_relu(s, 0.2) + torch.erf(s)
    ),
    "masked": lambda s, b, h, q, k: s.masked_fill(q - k > 30, float("-inf")) + torch.where(h < 2, ROWS[q], 0.25),
}


def in_place(s, b, h, q, k):
    s += SLOPES[h]
    s *= 0.5
    return s


SCORES["in_place"] = in_place
SCORES["a_wider_number"] = lambda s, b, h, q, k: s - WIDE * SLOPES[h] * (q - k).abs()
BY_TABLES = {
    "learned_buckets": lambda s, b, h, q, k: s + LEARNED[h, BUCKETS[k - q + LENGTH]],
    "clamped_distances": lambda s, b, h, q, k: s * LEARNED[h, (q - k).clamp(-4, 4) + 4],
    "of_rows": lambda s, b, h, q, k: s + ROWS[(q * 2) % LENGTH] * LEARNED[h, IDS[b, q]],
    "of_columns": lambda s, b, h, q, k: torch.tanh(s * LEARNED[1, IDS[b, k] + 2]),
    "of_pairs": lambda s, b, h, q, k: s + LEARNED[h, IDS[b, q] + IDS[b, k]] * ROWS[torch.maximum(q, k)],
    "of_a_table": lambda s, b, h, q, k: s + ROWS[(SLOPES[h] * 4 + q / 2).abs().to(torch.int64) % LENGTH],
    "a_diagonal": lambda s, b, h, q, k: s + TURNED[q, q, h],
}
"""Read at indices that are no axes, or one twice."""
MASKS_BY_ROWS = {
    "of_a_row": lambda b, h, q, k: (CHOSEN[b, q] == (k // 8).unsqueeze(-1)).any(dim=-1) | (CHOSEN[b, k].amax(-1) > 4),
}
BY_ROWS = {
    "a_product_of_rows": lambda s, b, h, q, k: s + (0.5 * TRIPLES[b, h, q] * TRIPLES[b, 0, k]).sum(-1),
    "a_sum_of_a_row": lambda s, b, h, q, k: (
        s * torch.tanh(TRIPLES[b, h, q] - TRIPLES[0, h, k, 1].unsqueeze(-1)).sum(dim=-1)
    ),
}
"""They read all elements along the last axis of a captured tensor."""


def tensors():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, HEADS, LENGTH, DIM, generator=generator, requires_grad=True) for _ in range(3)]


def by_torch(q, k, v, mask=None, score=None):
    """Attention in float64, with the functions on tensors of all pairs."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.mT / DIM**0.5
    if score is not None:
        scores = score(scores.clone(), *PLACES).double().expand(SIZES)
    if mask is not None:
        scores = scores.masked_fill(~mask(*PLACES), float("-inf"))
    return torch.softmax(scores, -1).nan_to_num() @ v


def assert_close(found, expected):
    """Within a few roundings of float32."""
    for own, other in zip(found, expected, strict=True):
        assert (own is None) == (other is None) or not (own if other is None else other).any()
        if own is not None and other is not None:
            own, other = own.detach(), other.detach()
            assert (own - other).abs().max() <= 4e-6 * max(1.0, float(other.abs().max()))


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


class Rounded(torch.autograd.Function):
    """Has another backward than what its forward computes."""

    @staticmethod
    def forward(ctx, x):
        return torch.floor(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "mod", [lambda s, b, h, q, k: Rounded.apply(s), lambda s, b, h, q, k: s + Rounded.apply(SLOPES[h])]
)
def test_a_function_with_a_backward_of_its_own_is_refused(mod, grad):
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="calls Rounded, an autograd Function"):
        score_mod(mod)


@torch.library.custom_op("mods_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


REFUSED = {
    "branches": (lambda b, h, q, k: q >= k if q > 3 else k > q, "branches on a value"),
    "takes_out": (lambda b, h, q, k: q >= k.item(), "branches on a value"),
    "unknown": (
        lambda b, h, q, k: torch.special.bessel_j0(q.float()) > 0,
        "uses special_bessel_j0, which kernels do not",
    ),
    "whole": (lambda b, h, q, k: q < SLOPES, r"takes a captured tensor of shape \(4,\) whole"),
    "half_indexed": (
        lambda b, h, q, k: TURNED[k].sum() > 0,
        r"that has an index for some of its axes only.*got \(45, 4\)",
    ),
    "a_row": (lambda b, h, q, k: IDS[b] == q, "makes a row of 45 elements, of which a pair has none"),
    "sums_bools": (
        lambda b, h, q, k: (CHOSEN[b, q] == k).sum() > 1,
        r"uses sum on torch\.bool, which makes torch\.int64",
    ),
    "sorts": (lambda b, h, q, k: CHOSEN[b, q].sort().values[0] > k, "uses sort"),
    "slices": (lambda b, h, q, k: IDS[b, :] == q, "indexes by slice"),
    "too_many": (lambda b, h, q, k: IDS[b, q, k] == q, "more indices than the 2 axes"),
    "writes": (lambda b, h, q, k: IDS.add_(q) > 0, "changes a captured tensor by add_"),
    "of_a_library": (lambda b, h, q, k: torch.ops.mods_tests.doubled(q) > k, "uses doubled of mods_tests"),
    "several": (lambda b, h, q, k: torch.stack([q, k]).any(), "uses stack|uses cat|does not make one element"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced_is_refused_with_its_line(name):
    mod, message = REFUSED[name]
    with pytest.raises(
        ValueError, match=rf"a mod must compute one element from one pair.*({message}).*\(test_mods.py:\d+\)"
    ):
        attention(*tensors(), mask=mod)


def test_other_mistakes():
    with pytest.raises(TypeError, match=r"a mask_mod must return a bool tensor; got torch\.int32"):
        mask_mod(lambda b, h, q, k: q - k)
    with pytest.raises(TypeError, match=r"a score_mod must return a floating-point tensor; got torch\.bool"):
        score_mod(lambda s, b, h, q, k: s > 0)
    with pytest.raises(TypeError, match="a mod must return a tensor; got NoneType"):
        mask_mod(lambda b, h, q, k: None)  # type: ignore[return-value]
    with pytest.raises(TypeError, match="mask_mod must be given a function; got Mask"):
        mask_mod(causal())
    with pytest.raises(ValueError, match=r"may raise to 0\.5 or to a whole number"):
        score_mod(lambda s, b, h, q, k: s.abs() ** 1.3)
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"what mask captured must have shape .*; got"):
        attention(q, k, v, mask=lambda b, h, q, k: IDS[:, :30][b, q] == 1)
    with pytest.raises(ValueError, match="must have at least 44 elements before its origin"):
        attention(q, k, v, scores=lambda s, b, h, q, k: s + TABLE[h, k - q + 30])


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
