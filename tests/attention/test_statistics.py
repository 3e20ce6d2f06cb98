"""The log-sum-exp, the largest score and the entropy of each row, against float64 and at the ends of their range."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch

from cs336_systems.attention import (
    attention,
    score_statistics,
    use_backends,
)
from cs336_systems.attention.mods import mask_mod
from cs336_systems.kernels.triton.tiles import TileConfig, pin
from cs336_systems.testing import Shapes, make_inputs, poisoned_memory
from cs336_systems.testing.evaluation import in_dtype, leaves_of, rounding_on

from .features import Maker
from .helpers import (
    DOUBLE,
    FLOAT,
    FLOATS,
    HALF,
    each_dtype,
    each_implementation,
    named,
    sizes_of,
    slow,
)
from .test_features import ALONE, GROUPED, TOGETHER

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
    assert not found.max_scores.requires_grad
    grads = torch.autograd.grad((found.lse, found.entropy), (*leaves, *further.values()), gradients)
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


class TestEnds:
    """Numbers at the ends of their range."""

    @each_implementation
    def test_one_key_has_no_entropy(self, impl, device):
        q, k = (300 * x for x in inputs_of(Shapes.of(3, q_len=40, k_len=1, d=16), device=device))
        q.requires_grad_()
        found = score_statistics(q, k, impl=impl)
        assert torch.equal(found.entropy, torch.zeros_like(found.entropy))
        torch.testing.assert_close(found.lse, found.max_scores)
        (dq,) = torch.autograd.grad(found.entropy.sum(), q)
        assert dq.isfinite().all()

    @each_implementation
    @pytest.mark.parametrize("keys", [2, 70])
    def test_equal_scores_have_the_largest_entropy(self, impl, device, keys):
        found = score_statistics(*(torch.ones(2, n, 16, device=device) for n in (40, keys)), scale=1e4, impl=impl)
        torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, math.log(keys)))
        torch.testing.assert_close(found.max_scores, torch.full_like(found.entropy, 16e4))

    @each_dtype(flash=FLOATS, tiled=(FLOAT, torch.bfloat16), naive=(FLOAT,))
    def test_scores_of_ten_thousand(self, impl, dtype, device):
        """Keys are rounded to 4 bits, so that scores are exact."""
        q = torch.randint(1, 9, (2, 50, 1), device=device).to(dtype).requires_grad_()
        k = torch.randint(-8, 9, (2, 60, 1), device=device).to(dtype).requires_grad_()
        with torch.no_grad():
            exact = score_statistics(q.double(), k.double(), scale=200.0, impl="naive")
        found = score_statistics(q, k, scale=200.0, impl=impl)
        assert float(exact.max_scores.max()) > 1e4
        torch.testing.assert_close([*found], [x.float() for x in exact], rtol=4e-6, atol=4e-6)
        dq, dk = torch.autograd.grad(found.entropy.sum() + found.lse.sum(), (q, k))
        assert dq.isfinite().all()
        assert dk.isfinite().all()

    @each_implementation
    @pytest.mark.parametrize("scale", [1e3, 1e6])
    def test_a_probability_of_1_keeps_its_gradient_however_large_scores_are(self, impl, device, scale):
        """The gradients of the log-sum-exp and of the entropy by a score are p and -p (log p + H), here 1 and 0."""
        q, k = inputs_of(Shapes.of(2, q_len=40, k_len=50, d=64), FLOAT, device)
        bias = torch.zeros(2, 40, 50, device=device, requires_grad=True)
        found = score_statistics(q, k, bias=bias, scale=scale, impl=impl)
        certain = found.entropy == 0
        assert certain.sum() > 70
        for name, expected in (("lse", 1.0), ("entropy", 0.0)):
            (gradient,) = torch.autograd.grad(getattr(found, name).sum(), bias, retain_graph=True)
            largest = gradient[certain].abs().amax(-1)
            torch.testing.assert_close(largest, torch.full_like(largest, expected))

    @each_implementation
    def test_the_ends_of_float32(self, impl, device):
        """Distances to the maximum overflow, and their exponentials are 0."""
        k = torch.tensor([-1e30, 1e30, 0.0, 1e30], device=device).view(1, 4, 1).expand(2, 4, 1)
        found = score_statistics(torch.full((2, 3, 1), 1e8, device=device), k, scale=2.0, impl=impl)
        assert torch.equal(found.max_scores, torch.full((2, 3), 1e30 * 1e8 * 2.0, device=device))
        torch.testing.assert_close(found.entropy, torch.full((2, 3), math.log(2), device=device))

    @each_implementation
    def test_scores_of_infinity_and_hidden_rows(self, impl, device):
        """Row 0 has a bias of -inf alone, row 1 sees nothing, row 2 one key of two, row 3 a bias of +inf."""
        q, k = inputs_of(Shapes.of(1, q_len=4, k_len=40, d=8, q_heads=1), device=device)
        bias = torch.zeros(4, 40, device=device)
        bias[0], bias[2, 2:], bias[2, 1], bias[3, 3] = -math.inf, -math.inf, -200.0, math.inf
        mask = torch.ones(4, 40, dtype=torch.bool, device=device)
        mask[1] = False
        leaves = [x.requires_grad_() for x in (q, k)]
        found = score_statistics(*leaves, bias=bias, mask=mask, impl=impl)
        assert found.lse[0, 0, :2].tolist() == found.max_scores[0, 0, :2].tolist() == [-math.inf] * 2
        assert found.entropy[0, 0, :3].tolist() == [0.0] * 3
        assert found.lse[0, 0, 3] == found.max_scores[0, 0, 3] == math.inf
        assert found.entropy[0, 0, 3].isnan()
        rows = found.entropy[0, 0, :3].sum() + found.lse[0, 0, 2]
        (dq,) = torch.autograd.grad(rows, q)
        assert dq[0, 0, 2].isfinite().all()
        assert torch.equal(dq[0, 0, :2], torch.zeros_like(dq[0, 0, :2]))

    @each_implementation
    def test_a_nan_is_seen_in_its_row_alone(self, impl, device):
        q, k = inputs_of(Shapes.of(1, q_len=5, k_len=40, d=8, q_heads=1), device=device)
        q[0, 0, 1, 3] = math.nan
        for x in score_statistics(q, k, impl=impl):
            assert x[0, 0].isnan().tolist() == [False, True, False, False, False]

    @each_implementation
    @pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
    def test_no_queries_or_no_keys(self, impl, device, lengths):
        shapes = Shapes.of(2, q_len=lengths[0], k_len=lengths[1], d=8, q_heads=2, kv_heads=1)
        sinks = torch.randn(2, device=device, requires_grad=True)
        leaves = [x.requires_grad_() for x in inputs_of(shapes, device=device)]
        found = score_statistics(*leaves, sinks=sinks, impl=impl)
        assert torch.equal(found.lse, sinks[:, None].expand(2, 2, lengths[0]))
        assert torch.equal(found.max_scores, torch.full_like(found.lse, -math.inf))
        assert torch.equal(found.entropy, torch.zeros_like(found.lse))
        dq, dk, dsinks = torch.autograd.grad((found.lse.sum(), found.entropy.sum()), (*leaves, sinks))
        assert torch.equal(dq, torch.zeros_like(dq))
        assert torch.equal(dk, torch.zeros_like(dk))
        torch.testing.assert_close(dsinks, torch.full_like(dsinks, 2.0 * lengths[0]))

    @each_implementation
    @pytest.mark.parametrize("shape", [(7, 8), (3, 7, 8), (2, 1, 3, 7, 8)])
    def test_any_number_of_axes(self, impl, device, shape):
        q, k = (torch.randn(shape, device=device) for _ in "qk")
        found = score_statistics(q, k, causal=True, impl=impl)
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(7, 7, device=device).triu(1).bool(), -math.inf)
        torch.testing.assert_close(found.max_scores, scores.amax(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


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
