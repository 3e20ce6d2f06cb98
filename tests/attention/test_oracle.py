"""What everything else is measured with: naive attention against attention in loops, and random inputs."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import LAYOUTS, Shapes, make_inputs, naive_results, poisoned_memory

GROUPED = Shapes.of(2, q_len=4, k_len=6, d=3, dv=2, q_heads=4, kv_heads=2)


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
