"""Rules that the caller writes: what masks combine to, what derivatives are, that both languages compute the same."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import triton

from cs336_systems.attention import attention, variants
from cs336_systems.attention.rules import predicate, score_rule
from cs336_systems.attention.variants.alibi import _alibi
from cs336_systems.attention.variants.bias import _bias
from cs336_systems.attention.variants.relative_bias import _relative_bias
from cs336_systems.kernels import rules
from cs336_systems.kernels.language import at, in_torch, jit, tanh, tl
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import Shapes, assert_within_budget, make_inputs

from ..helpers import check, each_implementation

SHAPES = Shapes.of(2, q_len=9, k_len=11, d=8, q_heads=2, kv_heads=1)
WIDE = torch.float64
BATCH, HEAD, ROW, COLUMN = torch.meshgrid(*map(torch.arange, (2, 2, 9, 11)), indexing="ij")


@jit
def distance(row, column):
    return tl.abs(row - column)


@jit
def reach_of(head):
    return 2 * head + LEAST


LEAST: tl.constexpr = tl.constexpr(3)


@predicate
def nearby(batch, head, row, column, most, shift):
    """Calls functions, and reads a constant."""
    return distance(row, column + shift) <= tl.minimum(reach_of(head), at(most, (batch, head)))


@predicate
def all_axes(batch, head, row, column, tensor):
    return at(tensor, (batch, head, row, column)) > 0


@predicate
def constant(batch, head, row, column):
    return True


@predicate
def of_heads(batch, head, row, column, chosen):
    return at(chosen, (head,)) != 0


def defined_twice(first):
    """One of two rules under one name."""
    if first:

        @predicate
        def visible(batch, head, row, column):
            return column < 3
    else:

        @predicate
        def visible(batch, head, row, column):
            return column < 7

    return visible


TWINS = defined_twice(True), defined_twice(False)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3, 3]])
KEY_IDS = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1, 3, 3, 4]])
LENGTHS, MOST, CHOSEN = torch.tensor([3, 0]), torch.tensor([[2, 9], [4, 4]]), torch.tensor([True, False])
SHOWN = torch.arange(-2, 9).view(1, 1, 1, 11)
ONES = [(), (0,), (1, 3), (2,), (0, 1), (0, 1, 2, 3)]
SIGNS = [torch.randint(-1, 2, [1 if axis in ones else n for axis, n in enumerate((2, 2, 9, 11))]) for ones in ONES]
"""Axes of size 1 are read at 0."""
MASKS = {
    "causal": (variants.causal(2), COLUMN <= ROW + 2),
    "window": (variants.window(3, 1, 2), (COLUMN >= ROW - 1) & (COLUMN <= ROW + 3)),
    "block_local": (variants.block_local(4), ROW // 4 == COLUMN // 4),
    "dilated": (variants.dilated(3), (ROW - COLUMN).abs() % 3 == 0),
    "prefix": (variants.prefix(LENGTHS), LENGTHS[BATCH] > COLUMN),
    "prefix_of_all": (variants.prefix(LENGTHS[:1].int()), COLUMN < 3),
    "document": (variants.document(IDS, KEY_IDS), IDS[BATCH, ROW] == KEY_IDS[BATCH, COLUMN]),
    "document_of_all": (variants.document(KEY_IDS[:1]), KEY_IDS[0, ROW] == KEY_IDS[0, COLUMN]),
    "visible_where": (variants.visible_where(SHOWN), COLUMN != 2),
    "functions": (nearby(MOST, 1), (ROW - COLUMN - 1).abs() <= torch.minimum(2 * HEAD + 3, MOST[BATCH, HEAD])),
    "constant": (constant(), COLUMN >= 0),
    "of_heads": (of_heads(CHOSEN), CHOSEN[HEAD]),
    "first_twin": (TWINS[0](), COLUMN < 3),
    "second_twin": (TWINS[1](), COLUMN < 7),
    **{f"ones_{ones}": (all_axes(x), (x > 0).expand(2, 2, 9, 11)) for ones, x in zip(ONES, SIGNS, strict=True)},
}


def combined():
    """Masks combine as booleans do."""
    (a, in_a), (b, in_b), (c, in_c) = (MASKS[name] for name in ("prefix", "causal", "document"))
    return {
        "and": (a & b, in_a & in_b),
        "or": (a | c, in_a | in_c),
        "not": (~c, ~in_c),
        "not_not": (~~a, in_a),
        "nested": (~(a | ~b) & c | a & ~c, ~(in_a | ~in_b) & in_c | in_a & ~in_c),
        "itself": (c & ~c | b & b, in_b),
        "nothing": (~constant(), COLUMN < 0),
        "twins": (TWINS[0]() | TWINS[1](), COLUMN < 7),
    }


COMBINED = combined()


@each_implementation
@pytest.mark.parametrize("name", [*MASKS, *COMBINED])
def test_masks_hide_what_they_say(device, impl, name):
    """Seen by equal scores and the identity for values."""
    mask, expected = (MASKS | COMBINED)[name]
    q, k = (torch.zeros(2, 2, length, 8, device=device) for length in (9, 11))
    moved = replace(mask, tensors=tuple(x.to(device) for x in mask.tensors))
    seen = attention(q, k, torch.eye(11, device=device).expand(2, 2, 11, 11), mask=moved, impl=impl) != 0
    assert torch.equal(seen.cpu(), expected)


@score_rule
def arithmetic(score, batch, head, row, column):
    bounded = tl.minimum(score, 0.2) + tl.maximum(score, -0.1) + tl.abs(score)
    return (score + 2.0) * (score - 1.0) / 3.0 - tl.where(score > 0.3, score, -0.5 * score) + bounded


@score_rule
def functions(score, batch, head, row, column):
    waves = tl.sin(score) * tl.cos(2.0 * score) + tl.sqrt(tl.abs(score) + 0.1) + tl.sigmoid(score)
    logarithms = tl.log(tl.abs(score) + 1.0) + tl.log2(tl.abs(score) + 2.0)
    return tl.exp(0.5 * score) + tl.exp2(-0.5 * score) + logarithms + waves


@score_rule
def infinite(score, batch, head, row, column):
    return tl.where(score > 1.0, float("-inf"), score)


@score_rule
def placed(score, batch, head, row, column):
    return score + tl.sin((3 * batch + 2 * head + row // 2 - column % 3).to(tl.float32))


@pytest.mark.parametrize("rule", [arithmetic, functions, infinite, placed], ids=lambda rule: rule.name)
def test_score_rules_compute_the_same_in_every_implementation(flash_device, rule):
    inputs = make_inputs(SHAPES, device=flash_device)
    for impl in ("tiled", "flash"):
        out = attention(*inputs[:3], scores=rule(), impl=impl)
        assert_within_budget({"out": out}, inputs, features={"scores": rule()})


def test_a_function_that_torch_has_not_is_refused():
    @jit
    def product_of(x):
        return tl.dot(x, x)

    with pytest.raises(AttributeError, match=r"a function of pairs may not use tl\.dot"):
        in_torch(product_of, torch.float32)(torch.ones(2, 2))


@jit
def bend(x):
    return tanh(x)


@triton.jit
def tanh_kernel(numbers, answers, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(answers + place, bend(tl.load(numbers + place)))


def test_tanh_is_exact_to_a_few_roundings(flash_device):
    magnitudes = torch.logspace(-30, 3, 2000, base=10, dtype=torch.float32)
    near = torch.linspace(0.4, 0.7, 47)
    numbers = torch.cat([-magnitudes, magnitudes, torch.tensor([0.0, float("inf")]), near]).to(flash_device)
    numbers = torch.nn.functional.pad(numbers, (0, 4096 - len(numbers)))
    answers = torch.empty_like(numbers)
    tanh_kernel[(1,)](numbers, answers, 4096, **compile_options())
    exact = torch.tanh(numbers.double())
    assert ((answers.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * exact.abs()).all()
    assert torch.equal(in_torch(bend, WIDE)(numbers.double()), exact)


VARIED = [
    (rules.registry[rules.SOFTCAP], [0.7]),
    (rules.registry[rules.SOFTCAP], [30]),
    (_alibi.code, [torch.rand(2, 2, dtype=WIDE), 2]),
    (_alibi.code, [torch.rand(1, 2, dtype=WIDE), -3]),
    (_bias.code, [torch.randn(2, 2, 9, 11, dtype=WIDE)]),
    (_bias.code, [torch.randn(1, 2, 1, 11, dtype=WIDE)]),
    (_relative_bias.code, [torch.randn(2, 2, 19, dtype=WIDE), 8]),
    (_relative_bias.code, [torch.randn(1, 2, 24, dtype=WIDE), 11]),
    (_relative_bias.code, [torch.randn(2, 2, 1, dtype=WIDE), 0]),
]


@pytest.mark.parametrize(("code", "captured"), VARIED)
def test_derivatives_of_variants_are_those_of_their_functions(code, captured):
    score = (3.0 * torch.randn(2, 2, 9, 11, dtype=WIDE)).requires_grad_()
    leaves = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in captured]
    arguments = (score, BATCH, HEAD, ROW, COLUMN, *leaves)
    changed = code.in_torch[WIDE](*arguments)
    weights = torch.randn_like(changed)
    tensors = {slot: leaf for slot, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    of_score, *of_captured = torch.autograd.grad(changed, (score, *tensors.values()), weights)
    slope = 1.0 if code.derivative is None else code.derivative_in_torch[WIDE](*arguments)
    torch.testing.assert_close(weights * slope, of_score)
    assert (of_score.abs() <= code.steepest * weights.abs() * (1 + 1e-12)).all()
    assert tensors.keys() == code.gradients.keys()
    for (slot, leaf), expected in zip(tensors.items(), of_captured, strict=True):
        own = code.gradients[slot]
        term = weights if own.code is None else weights * own.in_torch[WIDE](*arguments)
        distance = COLUMN - ROW + code.origin(slot, tuple(captured))
        places = {"batch": BATCH, "head": HEAD, "row": ROW, "column": COLUMN, "distance": distance}
        read = [places[name] * (size > 1) for name, size in zip(own.axes, leaf.shape, strict=True)]
        torch.testing.assert_close(torch.zeros_like(leaf).index_put(read, term.detach(), accumulate=True), expected)


SCORE_VARIANTS = {"softcap", "alibi", "bias", "relative_bias"}


def test_every_variant_is_tested():
    assert set(variants.__all__) <= {*MASKS} | SCORE_VARIANTS


def test_score_rules_are_applied_in_order(flash_device):
    """One rule twice, with tensors of its own each time."""
    inputs = make_inputs(Shapes.of(1, q_len=9, k_len=11, d=8, q_heads=2, kv_heads=1), device=flash_device)
    first, second = (torch.randn(1, 2, 1, 11, device=flash_device).requires_grad_() for _ in "ab")
    orders = itertools.permutations([variants.bias(first), variants.softcap(0.5), variants.bias(second)])
    outs = [check("flash", inputs, {"scores": one + two + three})["out"] for one, two, three in [*orders][:3]]
    assert not torch.allclose(outs[0], outs[1])


def test_no_two_functions_of_rules_share_a_name():
    """Within a kernel Triton takes functions of one name and types for one function, whatever they compute."""

    def make():
        @score_rule
        def changed(score, batch, head, row, column, rate):
            return score * at(rate, (head,))

        @changed.derivative
        def _(score, batch, head, row, column, rate):
            return at(rate, (head,))

        @changed.gradient("rate", axes="head")
        def _(score, batch, head, row, column, rate):
            return score

        return changed

    make(), make()
    names = Counter()
    for code in rules.registry.values():
        for function in (code.function, code.derivative, *[gradient.code for gradient in code.gradients.values()]):
            if function is not None:
                python = getattr(function, "fn", function)
                names[f"{python.__module__}.{python.__qualname__}"] += 1
    assert not [name for name, times in names.items() if times > 1]


def test_other_numbers_compile_nothing_anew(flash_device):
    """They are arguments of the kernels: the code of a mask and of scores is the same object."""
    inputs = make_inputs(SHAPES, device=flash_device)
    slopes = torch.rand(2, device=flash_device).requires_grad_()

    def call(number):
        features = {"softcap": float(number), "alibi_slopes": slopes, "dropout_p": 0.1 / number, "seed": 1}
        features["mask"] = variants.block_local(number) | variants.window(number, 1)
        check("flash", inputs, features)

    call(2)
    before = rules.mask_code.cache_info().misses, rules.score_code.cache_info().misses
    call(5)
    assert (rules.mask_code.cache_info().misses, rules.score_code.cache_info().misses) == before
