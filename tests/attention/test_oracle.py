"""What everything else is measured with: naive attention, random inputs, and the budget, which wrong kernels exceed."""

from __future__ import annotations

import functools
import math
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import (
    LAYOUTS,
    Shapes,
    assert_within_budget,
    budget_of,
    compare,
    evaluate,
    make_inputs,
    naive_results,
    oracle,
    poisoned_memory,
    roundings,
)

GROUPED = Shapes.of(2, q_len=4, k_len=6, d=3, dv=2, q_heads=4, kv_heads=2)
NAMES = ("out", "lse", "dq", "dk", "dv")
TILED = partial(attention, causal=True, impl="tiled", return_lse=True)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize(("q_len", "k_len"), [(3, 4), (4, 3)])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_naive_is_differentiable_twice(check, q_len, k_len, causal):
    shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=2, dv=3, q_heads=2, kv_heads=1)
    leaves = [x.requires_grad_() for x in make_inputs(shapes, dtype=torch.float64)[:3]]

    def finite(q, k, v):
        out, lse = attention(q, k, v, causal=causal, impl="naive", return_lse=True)
        return out, lse[lse.isfinite()]  # numerical derivatives of a log-sum-exp that is -inf are NaN

    assert check(finite, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("leading", [(3,), (3, 4), (2, 3, 4)])
def test_layouts_have_the_shapes_asked_for_and_random_values(layout, leading):
    heads = {} if len(leading) == 1 else {"q_heads": leading[-1], "kv_heads": 2}
    shapes = Shapes.of(*(leading if len(leading) == 1 else leading[:-1]), q_len=5, d=6, dv=7, **heads)
    inputs = make_inputs(shapes, layout=layout)
    assert tuple(x.shape for x in inputs[:3]) == shapes
    assert all(0.5 < x.std() < 1.5 for x in inputs)
    plain = all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in inputs[:3])
    assert plain == (layout == "contiguous")


def test_packed_tensors_share_their_memory():
    q, k, v, *_ = make_inputs(Shapes.of(2, q_len=5, d=6, q_heads=4, kv_heads=2), layout="packed")
    assert len({x.untyped_storage().data_ptr() for x in (q, k, v)}) == 1
    with pytest.raises(ValueError, match="k must have the length of q, 5, to be packed with it; got 6"):
        make_inputs(Shapes.of(2, q_len=5, k_len=6, d=6), layout="packed")
    with pytest.raises(ValueError, match=r"layout must be one of contiguous, .*; got 'rows'"):
        make_inputs(Shapes.of(2, q_len=5, d=6), layout="rows")


def test_inputs_repeat_with_a_generator():
    first, second = (make_inputs(GROUPED, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_poisoned_memory_is_nan_and_only_inside(device):
    with poisoned_memory():
        like = torch.zeros(4, device=device)
        made = [
            torch.empty(4, device=device),
            torch.empty_like(like),
            like.new_empty(4),
            torch.empty_strided((2,), (2,)),
        ]
    assert all(x.isnan().all() for x in made)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_yardstick_itself_is_good(dtype, device):
    """Twice naive's error allows nothing much while naive's error is a few roundings."""
    inputs = make_inputs(Shapes.of(2, q_len=129, d=64, q_heads=2), dtype=dtype, device=device)
    exact, naive = oracle(inputs, causal=True), naive_results(inputs, causal=True)
    for name, x in naive.items():
        assert (x.double() - exact[name]).norm() <= 4 * torch.finfo(dtype).eps * exact[name].norm(), name


def nudged(results, name, relative):
    """The results with one of them wrong by this much, in norm."""
    exact, noise = results[name].double(), torch.randn_like(results[name], dtype=torch.float64)
    wrong = exact + relative * exact.norm() / noise.norm() * noise
    return {**results, name: wrong.to(results[name].dtype)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e3])
def test_one_bad_element_is_beyond_the_budget(bad, dtype):
    inputs = make_inputs(GROUPED, dtype=dtype)
    for name in NAMES:
        results = naive_results(inputs)
        results[name][(-1,) * results[name].ndim] = bad
        with pytest.raises(AssertionError, match=rf"{name} +largest error .* <-- beyond"):
            assert_within_budget(results, inputs)


def test_infinities_must_be_where_the_oracle_has_them():
    inputs = make_inputs(Shapes.of(1, q_len=4, k_len=2, d=3))
    results = naive_results(inputs, causal=True)
    assert_within_budget(results, inputs, causal=True)
    results["lse"][0, 0] = -1e30
    with pytest.raises(AssertionError, match="lse"):
        assert_within_budget(results, inputs, causal=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dq": torch.zeros(1, 4, 4)}, r"dq must be torch.float32 \(1, 4, 3\); got torch.float32 \(1, 4, 4\)"),
        ({"dq": torch.zeros(1, 4, 3).half()}, r"dq must be torch.float32 .*; got torch.float16"),
        ({"other": torch.zeros(())}, "actual must have the results .*; got .*other"),
    ],
)
def test_results_of_another_kind_are_not_compared(change, message):
    inputs = make_inputs(Shapes.of(1, q_len=4, d=3))
    results = naive_results(inputs)
    with pytest.raises(ValueError, match=message):
        compare(results | change, oracle(inputs), results)


def test_results_that_nobody_wrote_are_beyond_the_budget():
    def forgetful(q, k, v):
        out = attention(q, k, v, impl="naive")
        return torch.cat([out[..., :-1, :], torch.empty_like(out)[..., -1:, :]], dim=-2)

    inputs = make_inputs(Shapes.of(1, q_len=4, d=3))
    with poisoned_memory():
        results = evaluate(forgetful, inputs)
    assert {*results} == {*NAMES} - {"lse"}
    with pytest.raises(AssertionError, match=r"out .* <-- beyond"):
        assert_within_budget(results, inputs)


@functools.cache
def long_call(dtype):
    """Inputs of 500 rows, and what they are held to."""
    torch.manual_seed(0)
    inputs = make_inputs(Shapes.of(1, q_len=500, d=64, q_heads=2), dtype=dtype)
    return inputs, budget_of(inputs, causal=True)[:3]


def beyond(results, dtype):
    """The names of the results that are beyond the budget."""
    return {finding.name for finding in compare(results, *long_call(dtype)[1]) if not finding.holds}


@pytest.mark.parametrize(
    ("dtype", "error", "of_gradients"),
    [(torch.float16, 2e-3, 3e-3), (torch.bfloat16, 1e-2, 1.5e-2), (torch.float32, 1e-5, 1e-5)],
)
def test_an_error_of_a_few_roundings_is_beyond_the_budget(dtype, error, of_gradients):
    """1 % in bfloat16, three roundings, for results whose naive error is one; the gradients of q and k have more."""
    results = evaluate(TILED, long_call(dtype)[0])
    assert beyond(results, dtype) == set()
    for name in NAMES:
        assert beyond(nudged(results, name, 1e-7), dtype) == set()
        relative = {"lse": 2e-6, "dq": of_gradients, "dk": of_gradients}.get(name, error)
        assert beyond(nudged(results, name, relative), dtype) == {name}


def scale_off(q, k, v):
    return TILED(q, k, v, scale=1.004 / 8)


def one_wrong_pair(row, column, q, k, v):
    seen = torch.ones(500, 500, dtype=torch.bool).tril()
    seen[row, column] ^= True
    return attention(q, k, v, mask=seen, impl="tiled", return_lse=True)


# The last row alone, which sees 500 keys, misses one; a row in the middle sees the key after its own.
one_key_hidden, one_key_too_many = partial(one_wrong_pair, -1, -1), partial(one_wrong_pair, 250, 251)


def narrow_scores(q, k, v):
    return attention(q, k, v, causal=True, impl="naive", return_lse=True)


def probabilities_of_eight_bits(q, k, v):
    """Rounded to bfloat16, whatever the dtype is."""
    scores = (q.float() @ k.float().mT / 8).masked_fill(torch.ones(500, 500).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1).bfloat16().float()
    return (weights @ v.float()).to(q.dtype), scores.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wrong", [scale_off, one_key_hidden, one_key_too_many, narrow_scores])
def test_wrong_kernels_are_beyond_the_budget(wrong, dtype):
    """In 16 bits, where an error may hide among roundings, the log-sum-exp shows it."""
    assert "lse" in beyond(evaluate(wrong, long_call(dtype)[0]), dtype)


def test_probabilities_of_too_few_bits_are_beyond_the_budget():
    results = evaluate(probabilities_of_eight_bits, long_call(torch.float16)[0])
    assert {"out", "dv"} <= beyond(results, torch.float16)


@pytest.mark.parametrize("q_len", [1, 40])
def test_all_pairs_of_a_row_share_the_rounding_of_delta(q_len):
    """A bias of a whole head gets the sum of all score gradients, which delta moves by a row's weights, which are 1."""
    inputs = make_inputs(Shapes.of(1, q_len=q_len, k_len=50, d=16), dtype=torch.float16)
    features = {"bias": torch.zeros(1, 1, 1).requires_grad_()}
    deviation = float(roundings(inputs, features=features)["dbias"])
    q, k, v, dout, dlse = (x.double() for x in inputs)
    weights = torch.softmax(q @ k.mT / 4, -1)
    products = dout * (weights @ v)
    own = weights * (dout @ v.mT - (products.sum(-1) - dlse)[..., None])
    expected = math.sqrt(float(own.square().sum() + products.square().sum())) * 2.0**-10 / math.sqrt(12)
    assert deviation == pytest.approx(expected, rel=1e-6 if q_len == 1 else 0.5)


def test_one_key_gives_gradients_of_0_that_are_differences_of_roundings():
    """Naive's are exact; the others' come from an output that was rounded."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        inputs = make_inputs(Shapes.of(4, q_len=3, k_len=1, d=64), dtype=dtype)
        assert_within_budget(evaluate(partial(attention, impl="tiled", return_lse=True), inputs), inputs)
