"""What everything else is measured with: naive attention against attention in loops, and random inputs."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import (
    LAYOUTS,
    Shapes,
    make_inputs,
    naive_results,
    poisoned_memory,
)

GROUPED = Shapes.of(2, q_len=4, k_len=6, d=3, dv=2, q_heads=4, kv_heads=2)


def attention_in_loops(q, k, v, causal, scale):
    """Attention of q (batch, heads, length, d) one score at a time, from the definition."""
    batch, heads, q_len, _ = q.shape
    k_len, group = k.shape[-2], heads // k.shape[-3]
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=q.dtype)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=q.dtype)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, q_len))).tolist():
        last = {False: k_len - 1, "top_left": i, "bottom_right": k_len - q_len + i}[causal]
        scores = {j: scale * sum(q[b, h, i] * k[b, h // group, j]) for j in range(k_len) if j <= last}
        if scores:
            weights = {j: math.exp(score) for j, score in scores.items()}
            total = sum(weights.values())
            lse[b, h, i] = math.log(total)
            out[b, h, i] = sum(weight / total * v[b, h // group, j] for j, weight in weights.items())
    return out, lse


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("scale", [None, -0.7])
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4), (5, 5)])
def test_naive_is_attention_as_defined(lengths, scale, causal):
    shapes = Shapes.of(2, q_len=lengths[0], k_len=lengths[1], d=3, dv=2, q_heads=4, kv_heads=2)
    q, k, v, *_ = make_inputs(shapes, dtype=torch.float64)
    out, lse = attention(q, k, v, causal=causal, scale=scale, impl="naive", return_lse=True)
    expected_out, expected_lse = attention_in_loops(q, k, v, causal, 3**-0.5 if scale is None else scale)
    torch.testing.assert_close(out, expected_out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-13, atol=1e-13)


def test_true_means_bottom_right():
    inputs = make_inputs(GROUPED)
    for name, expected in naive_results(inputs, causal="bottom_right").items():
        assert torch.equal(naive_results(inputs, causal=True)[name], expected)


@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), [(3, 4), (4, 3)])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_naive_is_differentiable_twice(check, q_len, k_len, return_lse, causal):
    shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=2, dv=3, q_heads=2, kv_heads=1)
    leaves = [x.requires_grad_() for x in make_inputs(shapes, dtype=torch.float64)[:3]]

    def finite(q, k, v):
        results = attention(q, k, v, causal=causal, impl="naive", return_lse=return_lse)
        # Numerical derivatives of a log-sum-exp that is -inf are NaN.
        return (results[0], results[1][results[1].isfinite()]) if return_lse else results

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
