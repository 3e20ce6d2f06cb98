"""Functions of a pair that are refused."""

from __future__ import annotations

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.attention.mods import mask_mod, score_mod
from cs336_systems.attention.variants import causal

from .cases import CHOSEN, IDS, SLOPES, TABLE, TURNED, Rounded, tensors


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
        ValueError, match=rf"a mod must compute one element from one pair.*({message}).*\(test_refused_mods.py:\d+\)"
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
