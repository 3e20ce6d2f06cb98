"""The log-sum-exp, the largest score and the entropy of each row, against float64 and at the ends of their range."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention, score_statistics, use_backends
from cs336_systems.attention.mods import mask_mod
from cs336_systems.kernels.triton.tiles import TileConfig, pin
from cs336_systems.testing import Shapes, make_inputs, poisoned_memory
from cs336_systems.testing.evaluation import in_dtype, leaves_of, rounding_on

from ..features import Maker
from ..helpers import DOUBLE, FLOAT, FLOATS, HALF, each_dtype, named, sizes_of, slow
from ..test_features import ALONE, GROUPED, TOGETHER

NAMES = ("lse", "max_scores", "entropy")


def without_dropout(features):
    return {name: x for name, x in features.items() if name not in ("dropout_p", "seed")}


FEATURES = {name: make for name, make in {**ALONE, **TOGETHER}.items() if name != "dropout"}
FAST = ["window", "bias_of_keys", "documents", "rules", "distances", "window_mask_dropout_sinks"]


def evaluated(function, tensors, features, gradients):
    """What `score_statistics` returns, and gradients of q, k and of the features that require one, by name."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    given, further = leaves_of(features)
    with poisoned_memory():
        found = function(*leaves, **given)
        grads = torch.autograd.grad((found.lse, found.entropy), (*leaves, *further.values()), gradients)
    assert not found.max_scores.requires_grad
    return dict(zip((*NAMES, "dq", "dk", *further), (*found, *grads), strict=True))


def hold(results, naive, exact):
    """Errors are at most twice those of naive, and some roundings, more for sums of more terms."""
    pairs = results["lse"].numel() * max(results["dk"].shape)
    for name, x in results.items():
        x, expected = x.detach(), exact[name].detach()
        assert x.shape == expected.shape, name
        assert torch.equal(x.isinf(), expected.isinf()), name
        error, naive_error = (
            float(torch.where(y == expected, 0.0, y.double() - expected).abs().max()) for y in (x, naive[name].detach())
        )
        size = float(expected.masked_fill(expected.isinf(), 0.0).abs().max())
        rounding = 4 * rounding_on(x.device) if x.dtype != DOUBLE else 64 * torch.finfo(DOUBLE).eps
        rounding *= 1.0 if name in NAMES else max(1.0, pairs / max(1, x.numel())) ** 0.5
        allowed = 2 * naive_error + rounding * max(1.0, size) + torch.finfo(x.dtype).eps / 2 * size
        assert error <= allowed, (name, error, naive_error, allowed)


def check(impl, tensors, features=None, *, function=score_statistics, **settings):
    """The statistics and their gradients against naive's in float64."""
    features, (q, k) = features or {}, tensors
    wide = torch.promote_types(q.dtype, FLOAT)
    with torch.no_grad():
        shape = function(q, k, impl="naive", **settings, **features).lse.shape
    gradients = [torch.randn(shape, dtype=wide, device=q.device) for _ in range(2)]
    call = partial(function, **settings)
    results = evaluated(partial(call, impl=impl), tensors, features, gradients)
    naive = evaluated(partial(call, impl="naive"), tensors, features, gradients)
    exact = evaluated(
        partial(call, impl="naive"), [x.double() for x in tensors], in_dtype(features, DOUBLE),
        [x.double() for x in gradients],
    )  # fmt: skip
    for name in NAMES:
        assert results[name].dtype == wide
    assert float(results["entropy"].detach().min()) >= 0
    hold(results, naive, exact)
    return results


def inputs_of(shapes=GROUPED, dtype=FLOAT, device="cpu", **settings):
    return make_inputs(shapes, dtype=dtype, device=device, **settings)[:2]


@pytest.mark.parametrize("name", named(FEATURES, FAST))
@each_dtype(flash=FLOATS, tiled=(FLOAT, DOUBLE))
def test_values_and_gradients_are_naives(impl, dtype, device, name):
    features = without_dropout(FEATURES[name](Maker(sizes_of(GROUPED), dtype, device)))
    causal = "bottom_right" if name in TOGETHER else False
    check(impl, inputs_of(dtype=dtype, device=device), features, causal=causal)


@each_dtype(flash=FLOATS, tiled=(FLOAT, torch.bfloat16), naive=(FLOAT,))
@pytest.mark.parametrize("lengths", [(130, 150), pytest.param((150, 130), marks=slow)])
@pytest.mark.parametrize("causal", [True, "top_left"])
def test_lengths_beyond_a_tile_and_rows_that_see_nothing(impl, dtype, device, lengths, causal):
    shapes = Shapes.of(1, q_len=lengths[0], k_len=lengths[1], d=16, q_heads=4, kv_heads=2)
    settings = {"causal": causal, "window": (70, None), "scale": -0.3}
    check(impl, inputs_of(shapes, dtype, device, layout="length_before_heads"), **settings)


@slow
@pytest.mark.parametrize("d", [1, 40, 264, 576])
def test_head_dimensions(flash_device, d):
    shapes = Shapes.of(1, q_len=20, k_len=40, d=d, q_heads=2, kv_heads=1)
    for dtype in (FLOAT, HALF):
        check("flash", inputs_of(shapes, dtype, flash_device), causal=True)


@slow
@pytest.mark.parametrize("tiles", [(16, 64), (64, 16)])
def test_tiles(flash_device, tiles):
    with pin(forward=TileConfig(*tiles, 4, 1)):
        check("flash", inputs_of(device=flash_device), {"softcap": 2.0}, causal=True, window=(9, None))


@pytest.mark.parametrize("with_features", [False, True])
def test_naive_is_what_the_definitions_say(device, with_features):
    """Written out; the other implementations are compared with naive."""
    shapes = Shapes.of(2, q_len=10, k_len=7, d=4, q_heads=4, kv_heads=2)
    q, k = inputs_of(shapes, DOUBLE, device)
    make = Maker(sizes_of(shapes), DOUBLE, device)
    tensors = make.bias("hqk") | make.mask("bqk") | make.sinks() if with_features else {}
    found = score_statistics(q, k, causal=True, softcap=0.7, scale=0.3, impl="naive", **tensors)
    scores = 0.7 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 0.3 / 0.7)
    seen = torch.arange(7, device=device) <= torch.arange(10, device=device)[:, None] - 3
    sinks = torch.full((4,), -math.inf, dtype=DOUBLE, device=device)
    if with_features:
        scores, seen, sinks = scores + tensors["bias"], seen & tensors["mask"], tensors["sinks"]
    scores = scores.masked_fill(~seen, -math.inf)
    assert torch.equal(found.max_scores == -math.inf, ~seen.any(-1).expand(2, 4, 10))
    torch.testing.assert_close(found.max_scores, scores.amax(-1))
    exponentials = torch.cat([scores.exp(), sinks.exp()[:, None].expand(2, 4, 10)[..., None]], -1)
    total = exponentials.sum(-1)
    torch.testing.assert_close(found.lse, total.log())
    p = exponentials / total.masked_fill(total == 0, 1.0)[..., None]
    torch.testing.assert_close(found.entropy, torch.special.entr(p).sum(-1))
    _, lse = attention(q, k, k, causal=True, softcap=0.7, scale=0.3, return_lse=True, **tensors)
    torch.testing.assert_close(found.lse, lse)


def test_functions_of_a_pair_and_lists_of_blocks(flash_device):
    """Functions are recorded as `attention` records them, and lists of blocks say which tiles are visited."""
    q, k = inputs_of(Shapes.of(2, q_len=150, k_len=260, d=16, q_heads=2, kv_heads=1), device=flash_device)
    ids = (torch.arange(260, device=flash_device) // 60).expand(2, -1)
    slopes = torch.rand(2, device=flash_device)

    def same(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    tensors = {"mask": (ids[:, :150, None] == ids[:, None])[:, None]}
    rows, columns = torch.arange(150, device=flash_device)[:, None], torch.arange(260, device=flash_device)
    tensors["bias"] = -slopes[:, None, None] * (rows - columns).abs()
    expected = score_statistics(q, k, causal=True, impl="naive", **tensors)
    mask = mask_mod(same).with_blocks(150, 260, causal=True, batch=2, device=q.device)
    for impl, given in (("flash", same), ("flash", mask), ("tiled", mask), ("naive", mask)):
        found = score_statistics(q, k, causal=True, mask=given, scores=alibi, impl=impl)
        torch.testing.assert_close([*found], [*expected], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="mask must have blocks that were found for this call"):
        score_statistics(q[:, :, 1:], k, causal=True, mask=mask)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(2, 7, 5)}, ValueError, "k must have shape (2, *, 4) to match q; got (2, 7, 5)"),
        ({"k": torch.zeros(2, 7, 4).double()}, TypeError, "k must have dtype torch.float32 to match q"),
        ({"causal": 3}, TypeError, "causal must be True, False"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks must have shape (1,), a logit for each head; got (3,)"),
        ({"impl": "fast"}, ValueError, "impl must be one of "),
        ({"impl": "sdpa"}, ValueError, "impl='sdpa' cannot compute this call: score_statistics has"),
        ({"impl": "compiled"}, ValueError, "impl='compiled' cannot compute this call: score_statistics has"),
    ],
)
def test_refusals(change, error, message):
    arguments = {"q": torch.zeros(2, 5, 4), "k": torch.zeros(2, 7, 4)} | change
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        score_statistics(**arguments)


def test_backends_that_are_excluded():
    q = torch.zeros(7, 2, 4)
    with pytest.raises(ValueError, match=r"use_backends\(\) allows only sm90"), use_backends("sm90"):
        score_statistics(q[:, 0], q[:, 0])
