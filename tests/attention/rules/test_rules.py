"""Masks and score changes that have names: what masks combine to, what derivatives are, what compiles anew."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import triton

from cs336_systems.attention import attention, variants
from cs336_systems.attention.mods import mask_mod
from cs336_systems.kernels import rules
from cs336_systems.kernels.language import in_torch, jit, tanh, tl
from cs336_systems.kernels.mods import registry
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import Shapes, make_inputs

from ..helpers import check, each_implementation

SHAPES = Shapes.of(2, q_len=9, k_len=11, d=8, q_heads=2, kv_heads=1)
WIDE = torch.float64
BATCH, HEAD, ROW, COLUMN = torch.meshgrid(*map(torch.arange, (2, 2, 9, 11)), indexing="ij")


IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 3, 3]])
KEY_IDS = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1, 3, 3, 4]])
ENDS = torch.tensor([[7, 7, 4, 4, 7, 7, 7, 9, 9, 0, 0], [3, 3, 3, 9, 9, 6, 7, 9, 9, 9, 9]])
LENGTHS, CHOSEN = torch.tensor([3, 0]), torch.tensor([True, False])
SHOWN = torch.arange(-2, 9).view(1, 1, 1, 11)
ONES = [(), (0,), (1, 3), (2,), (0, 1), (0, 1, 2, 3)]
SIGNS = [torch.randint(0, 2, [1 if axis in ones else n for axis, n in enumerate((2, 2, 9, 11))]) for ones in ONES]
"""Axes of size 1 are read at 0."""
MASKS = {
    "causal": (variants.causal(2), COLUMN <= ROW + 2),
    "window": (variants.window(3, 1, 2), (COLUMN >= ROW - 1) & (COLUMN <= ROW + 3)),
    "block_local": (variants.block_local(4), ROW // 4 == COLUMN // 4),
    "dilated": (variants.dilated(3), (ROW - COLUMN).abs() % 3 == 0),
    "prefix": (variants.prefix(LENGTHS), LENGTHS[BATCH] > COLUMN),
    "prefix_of_all": (variants.prefix(LENGTHS[:1].int()), COLUMN < 3),
    "prefix_tree": (variants.prefix_tree(ENDS), (COLUMN <= ROW) & (ENDS[BATCH, COLUMN] > ROW)),
    "document": (variants.document(IDS, KEY_IDS), IDS[BATCH, ROW] == KEY_IDS[BATCH, COLUMN]),
    "document_of_all": (variants.document(KEY_IDS[:1]), KEY_IDS[0, ROW] == KEY_IDS[0, COLUMN]),
    "visible_where": (variants.visible_where(SHOWN), COLUMN != 2),
    "constant": (mask_mod(lambda b, h, q_idx, kv_idx: q_idx == q_idx), COLUMN >= 0),
    "of_heads": (mask_mod(lambda b, h, q_idx, kv_idx: CHOSEN[h]), CHOSEN[HEAD]),
    **{
        f"ones_{ones}": (variants.visible_where(x), (x != 0).expand(2, 2, 9, 11))
        for ones, x in zip(ONES, SIGNS, strict=True)
    },
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
        "nothing": (~MASKS["constant"][0], COLUMN < 0),
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
    variants.softcap(0.7),
    variants.softcap(30),
    variants.alibi(torch.rand(2, 2, dtype=WIDE), 2),
    variants.alibi(torch.rand(1, 2, dtype=WIDE), torch.tensor([-3, 1])),
    variants.bias(torch.randn(2, 2, 9, 11, dtype=WIDE)),
    variants.bias(torch.randn(1, 2, 1, 11, dtype=WIDE)),
    variants.relative_bias(torch.randn(2, 2, 19, dtype=WIDE), 8),
    variants.relative_bias(torch.randn(1, 2, 24, dtype=WIDE), 11),
    variants.relative_bias(torch.randn(2, 2, 1, dtype=WIDE), 0),
]


@pytest.mark.parametrize("scores", VARIED)
def test_derivatives_of_variants_are_those_of_their_functions(scores):
    [(name, captured)] = scores.expression
    code, tensors = registry[name], iter(scores.tensors)
    score = (3.0 * torch.randn(2, 2, 9, 11, dtype=WIDE)).requires_grad_()
    given = [next(tensors).clone() if x is None else x for x in captured]
    leaves = {n: x.requires_grad_() for n, x in enumerate(given) if torch.is_tensor(x) and x.is_floating_point()}
    arguments = (score, BATCH, HEAD, ROW, COLUMN, *given)
    changed = code.in_torch[WIDE](*arguments)
    weights = torch.randn_like(changed)
    of_score, *of_captured = torch.autograd.grad(changed, (score, *leaves.values()), weights)
    slope = 1.0 if code.derivative is None else code.derivative_in_torch[WIDE](*arguments)
    torch.testing.assert_close(weights * slope, of_score)
    assert (of_score.abs() <= code.steepest * weights.abs() * (1 + 1e-12)).all()
    assert leaves.keys() == code.gradients.keys()
    for (slot, leaf), expected in zip(leaves.items(), of_captured, strict=True):
        own = code.gradients[slot]
        term = weights if own.code is None else weights * own.in_torch[WIDE](*arguments)
        distance = COLUMN - ROW + code.origin(slot, captured)
        places = {"batch": BATCH, "head": HEAD, "row": ROW, "column": COLUMN, "distance": distance}
        read = [places[name] * (size > 1) for name, size in zip(own.axes, leaf.shape, strict=True)]
        torch.testing.assert_close(torch.zeros_like(leaf).index_put(read, term.detach(), accumulate=True), expected)


SCORE_VARIANTS = {"softcap", "alibi", "bias", "relative_bias"}
LAYOUTS = {"TreeLayout", "tree_layout"}


def test_every_variant_is_tested():
    assert set(variants.__all__) <= {*MASKS} | SCORE_VARIANTS | LAYOUTS


def test_score_rules_are_applied_in_order(flash_device):
    """One rule twice, with tensors of its own each time."""
    inputs = make_inputs(Shapes.of(1, q_len=9, k_len=11, d=8, q_heads=2, kv_heads=1), device=flash_device)
    first, second = (torch.randn(1, 2, 1, 11, device=flash_device).requires_grad_() for _ in "ab")
    orders = itertools.permutations([variants.bias(first), variants.softcap(0.5), variants.bias(second)])
    outs = [check("flash", inputs, {"scores": one + two + three})["out"] for one, two, three in [*orders][:3]]
    assert not torch.allclose(outs[0], outs[1])


def test_other_numbers_compile_nothing_anew(flash_device):
    """They are arguments of the kernels: the code of a mask and of scores is the same object."""
    inputs = make_inputs(SHAPES, device=flash_device)
    slopes = torch.rand(2, device=flash_device).requires_grad_()

    def call(number):
        features = {"softcap": float(number), "alibi_slopes": slopes, "dropout_p": 0.1 / number, "seed": 1}
        features["mask"] = variants.causal(number) | variants.window(number, 1)
        check("flash", inputs, features)

    call(2)
    before = rules.mask_code.cache_info().misses, rules.score_code.cache_info().misses
    call(5)
    assert (rules.mask_code.cache_info().misses, rules.score_code.cache_info().misses) == before
