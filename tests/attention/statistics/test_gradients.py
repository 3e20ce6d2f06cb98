"""Gradients of the statistics of scores, and how torch's tracers and transforms see them."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cs336_systems.attention import score_statistics, tiled
from cs336_systems.attention.statistics import tiled as tiled_statistics
from cs336_systems.attention.variants import document
from cs336_systems.kernels.call import NO_AUX, Options, Wanted
from cs336_systems.testing import Shapes
from cs336_systems.testing.evaluation import leaves_of

from ..features import Maker
from ..helpers import (
    COMPILES,
    DOUBLE,
    FLOAT,
    HALF,
    Record,
    detached,
    each_dtype,
    each_implementation,
    flat,
    one_graph,
    sizes_of,
    slow,
)
from ..test_features import GROUPED
from .test_values import FEATURES, check, inputs_of, without_dropout


class TestGradients:
    @pytest.mark.parametrize("impl", ["naive", "tiled"])
    @pytest.mark.parametrize("name", ["window", "bias", "rules", "distances", "window_mask_dropout_sinks"])
    def test_gradcheck(self, impl, name):
        shapes = Shapes.of(1, q_len=5, k_len=6, d=3, q_heads=2, kv_heads=1)
        features = without_dropout(FEATURES[name](Maker(sizes_of(shapes), DOUBLE, "cpu")))
        given, further = leaves_of(features)
        leaves = [x.requires_grad_() for x in inputs_of(shapes, DOUBLE)]

        def function(*_):
            found = score_statistics(*leaves, impl=impl, causal=True, **given)
            return found.lse.masked_fill(found.lse == -math.inf, 0.0), found.entropy

        assert torch.autograd.gradcheck(function, (*leaves, *further.values()))

    def test_of_naive_twice(self):
        leaves = [x.requires_grad_() for x in inputs_of(Shapes.of(1, q_len=3, k_len=4, d=2), DOUBLE)]
        assert torch.autograd.gradgradcheck(lambda *qk: score_statistics(*qk, impl="naive")[::2], leaves)

    @pytest.mark.parametrize("impl", ["flash", "tiled"])
    def test_of_the_others_once(self, impl, device):
        q, k = (x.requires_grad_() for x in inputs_of(device=device))
        (dq,) = torch.autograd.grad(score_statistics(q, k, impl=impl).entropy.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated twice; impl='naive' can"):
            dq.sum().backward()

    @each_implementation
    def test_of_one_of_both(self, impl, device):
        tensors, zero = inputs_of(device=device), torch.zeros(2, 2, 35, device=device)
        leaves = [x.requires_grad_() for x in tensors]
        found = score_statistics(*leaves, impl=impl)
        for name, pair in (("lse", (zero + 1, zero)), ("entropy", (zero, zero + 1))):
            alone = torch.autograd.grad(getattr(found, name).sum(), leaves, retain_graph=True)
            both = torch.autograd.grad((found.lse, found.entropy), leaves, pair, retain_graph=True)
            torch.testing.assert_close(alone, both)

    def test_of_16_bits_by_the_kernels_of_attention(self, flash_device, monkeypatch):
        monkeypatch.setattr(tiled_statistics, "backward", None)
        check("flash", inputs_of(dtype=HALF, device=flash_device), causal=True)

    @pytest.mark.parametrize(("factor", "size"), [(2.0**26, 2.0**-10), (2.0**-13, 1.0)])
    def test_of_16_bits_have_the_range_of_float32(self, factor, size, flash_device):
        """dS of float16 would overflow, or be 0, as loss scaling and means over many rows make it."""
        inputs = inputs_of(Shapes.of(1, q_len=32, k_len=500, d=16, q_heads=2), HALF, flash_device)
        results = []
        for impl, dtype in (("flash", HALF), ("naive", DOUBLE)):
            leaves = [((x / 8 + 1) * size).to(HALF).to(dtype).requires_grad_() for x in inputs]
            found = score_statistics(*leaves, impl=impl)
            results.append(torch.autograd.grad((found.lse + found.entropy).sum() * factor, leaves))
        for actual, expected in zip(*results, strict=True):
            error = (actual.double() - expected).norm() / expected.to(HALF).double().norm()
            assert error < 2e-3 + float((expected.to(HALF) - expected).norm() / expected.norm())

    @pytest.mark.parametrize("impl", ["flash", "tiled"])
    def test_nothing_quadratic_is_saved(self, impl, device):
        q, k = inputs_of(Shapes.of(1, q_len=70, k_len=90, d=4), device=device)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            found = score_statistics(q.requires_grad_(), k, impl=impl)
        assert sorted(saved) == [70, 70, 280, 360]
        found.entropy.sum().backward()

    def test_tiled_makes_tiles_alone(self, device):
        class Sizes(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                sizes.extend(x.numel() for x in flat(result))
                return result

        q, k = inputs_of(Shapes.of(1, q_len=70, k_len=90, d=4), device=device)
        sizes: list[int] = []
        with Sizes():
            lse, _, entropy = tiled_statistics.forward(q, k, Options(scale=0.5), NO_AUX)
            tiled_statistics.backward(q, k, lse, entropy, lse, lse, Options(scale=0.5), NO_AUX, Wanted())
        assert max(sizes) == tiled.TILE_Q * tiled.TILE_K < 70 * 90


class TestTraced:
    pytestmark = COMPILES

    @pytest.mark.parametrize("impl", ["tiled", "naive", pytest.param("flash", marks=slow), "auto"])
    def test_one_graph_computes_what_eager_does(self, impl, device):
        sinks, ids = torch.randn(2, device=device), torch.arange(41, device=device)[None] // 8

        def call(q, k, sinks):
            mask = document(ids[:, 6:], ids)
            return score_statistics(q, k, causal=True, sinks=sinks, softcap=2.0, mask=mask, impl=impl)

        gradients = [torch.randn(2, 2, 35, device=device) for _ in range(2)]
        results = []
        for function in (call, one_graph(call)):
            leaves = [x.detach().requires_grad_() for x in (*inputs_of(device=device), sinks)]
            torch.manual_seed(1)
            leaves = [torch.randn_like(x).requires_grad_() for x in leaves]
            found = function(*leaves)
            assert not found.max_scores.requires_grad
            results.append([*found, *torch.autograd.grad((found.lse, found.entropy), leaves, gradients)])
        torch.testing.assert_close(*results)

    @each_dtype(flash=(HALF, FLOAT), tiled=(FLOAT,))
    def test_operators(self, impl, dtype, device):
        leaves = [x.requires_grad_() for x in inputs_of(dtype=dtype, device=device)]
        features = Maker(sizes_of(GROUPED), FLOAT, device).tensors("bias", "alibi_slopes", "sinks", "mask")
        # Its gradient is laid out like it.
        features["bias"] = features["bias"].detach().mT.contiguous().mT.requires_grad_()
        with Record() as record:
            found = score_statistics(*leaves, impl=impl, causal=True, softcap=2.0, **features)
            torch.autograd.grad((found.lse.sum(), found.entropy.sum()), (*leaves, features["bias"], features["sinks"]))
        names = [str(operator) for operator, _ in record.calls]
        assert names == [f"cs336_systems.statistics_{way}.default" for way in ("forward", "backward")]
        for operator, arguments in record.calls:
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(operator, detached(arguments), test_utils=checks)

    def test_torch_func_transforms_naive(self):
        q, k = inputs_of(Shapes.of(3, q_len=5, k_len=6, d=4, q_heads=2), DOUBLE)
        expected = torch.stack([score_statistics(x, y).entropy for x, y in zip(q, k, strict=True)])
        torch.testing.assert_close(torch.func.vmap(lambda x, y: score_statistics(x, y).entropy)(q, k), expected)
        message = "impl='tiled' cannot compute this call: torch.func and forward-mode derivatives need impl='naive'"
        with pytest.raises(ValueError, match=re.escape(message)):
            torch.func.grad(lambda x: score_statistics(x, k, impl="tiled").entropy.sum())(q)
        tangent = torch.randn_like(k)
        _, expected = torch.func.jvp(lambda y: score_statistics(q, y).lse, (k,), (tangent,))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(k, tangent)
            torch.testing.assert_close(forward_ad.unpack_dual(score_statistics(q, dual).lse).tangent, expected)
            with pytest.raises(ValueError, match=re.escape(message)):
                score_statistics(q, dual, impl="tiled")

    def test_autocast_casts_inputs(self, device):
        q, k = inputs_of(device=device)
        with torch.autocast(device.type, torch.bfloat16):
            found = score_statistics(q, k)
        assert {x.dtype for x in found} == {FLOAT}
        expected = score_statistics(q.bfloat16(), k.bfloat16())
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
