"""One table of calls, and every implementation on each: values and gradients against float64, within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import LAYOUTS, Inputs, Shapes, assert_within_budget, evaluate, make_inputs

from .helpers import DOUBLE, FLOAT, FLOATS, HALF, check, each_dtype, named, slow


class Case(NamedTuple):
    """A call of `attention`."""

    shapes: Shapes
    causal: bool | str = False
    scale: float | None = None
    layout: str = "contiguous"

    @property
    def settings(self) -> dict[str, Any]:
        return {"causal": self.causal, "scale": self.scale}

    def inputs(self, dtype: torch.dtype, device: torch.device) -> Inputs:
        return make_inputs(self.shapes, dtype=dtype, device=device, layout=self.layout)


def cases() -> Iterator[tuple[str, Case]]:
    # One more and one less than a tile, alone and against other lengths, under every mask that is another one.
    for q_len, k_len in [(1, 1), (63, 63), (127, 127), (129, 129), (63, 129), (1, 127), (129, 63), (127, 1)]:
        for causal in (False, "top_left") if q_len == k_len else (False, "top_left", "bottom_right"):
            shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=16)
            yield f"lengths-{q_len}x{k_len}-{causal or 'full'}", Case(shapes, causal)
    # Every head dimension that kernels pad differently, and values wider and narrower than keys.
    same = [(d, d) for d in (1, 16, 40, 64, 80, 96, 128, 192, 256)]
    # Of the second and third ptxas 12.8 lost the address of a tile (see docs/kernels.md).
    # Wider than a tile: products in slices, and a slice of the results for each program.
    wide = (576, 512), (300, 270), (24, 513), (257, 8), (1024, 1024)
    for d, dv in (*same, *wide, (1, 3), (1, 27), (19, 9), (40, 24), (64, 128), (128, 64), (16, 256), (192, 128)):
        # The widest in one tile of rows: to interpret it takes half a minute otherwise.
        q_len, k_len = (33, 67) if d < 1024 else (9, 35)
        yield f"head_dims-{d}x{dv}", Case(Shapes.of(1, q_len=q_len, k_len=k_len, d=d, dv=dv), True)
    # Any number of leading axes, and key heads that serve groups of query heads.
    for name, leading, heads, causal in (
        ("none", (), {}, True),
        ("batch", (3,), {}, True),
        ("heads", (2,), {"q_heads": 3}, True),
        ("two_batch_axes", (2, 1), {"q_heads": 2}, True),
        ("three_batch_axes", (1, 2, 2), {"q_heads": 2, "kv_heads": 1}, True),
        ("grouped", (2,), {"q_heads": 6, "kv_heads": 2}, True),
        ("grouped-full", (2,), {"q_heads": 6, "kv_heads": 2}, False),
        ("multi_query", (2,), {"q_heads": 4, "kv_heads": 1}, True),
    ):
        yield f"axes-{name}", Case(Shapes.of(*leading, q_len=35, k_len=37, d=24, **heads), causal)
    shapes = Shapes.of(1, q_len=20, k_len=70, d=8, q_heads=2, kv_heads=1)
    for scale in (0.3, -0.5, 0.0, 1, 1e-30):
        yield f"scale-{scale}", Case(shapes, "bottom_right", scale)
    # Every arrangement in memory with heads in groups, and those that are another one without a head axis.
    shapes = Shapes.of(2, q_len=35, k_len=35, d=24, dv=40, q_heads=4, kv_heads=2)
    for layout in LAYOUTS:
        yield f"layout-{layout}-heads", Case(shapes, "top_left", layout=layout)
    for layout in ("length_before_heads", "column_major", "kv_shared_by_heads", "packed"):
        yield f"layout-{layout}-no_heads", Case(Shapes.of(3, q_len=35, k_len=35, d=20), "top_left", layout=layout)
    for layout in ("length_before_heads", "padded_rows", "column_major", "misaligned"):
        yield f"layout-{layout}-wide", Case(Shapes.of(2, q_len=20, d=300), layout=layout)
    # Queries that see no key, in some tiles, in part of one, and all of them.
    for name, factor in (("", None), ("-negated", -1.0)):
        yield f"blind-some_tiles{name}", Case(Shapes.of(1, q_len=140, k_len=9, d=16), "bottom_right", factor)
        shapes = Shapes.of(1, q_len=20, k_len=7, d=16, q_heads=4, kv_heads=2)
        yield f"blind-grouped{name}", Case(shapes, "bottom_right", factor)
    yield "blind-no_keys", Case(Shapes.of(2, q_len=5, k_len=0, d=16, q_heads=2), "bottom_right")
    for name, shapes in {
        "queries": Shapes.of(2, q_len=0, k_len=5, d=16, q_heads=2),
        "keys": Shapes.of(2, q_len=5, k_len=0, d=16, dv=8),
        "both": Shapes.of(2, q_len=0, k_len=0, d=16),
        "batch": Shapes.of(0, q_len=5, k_len=5, d=16, q_heads=2),
        "heads": Shapes.of(2, q_len=5, k_len=5, d=16, q_heads=0),
    }.items():
        for causal in (False, "top_left"):
            yield f"empty-{name}-{causal or 'full'}", Case(shapes, causal)


CASES = dict(cases())
FAST = {
    *(f"lengths-{sizes}" for sizes in ("1x1-full", "63x129-bottom_right", "129x63-top_left")),
    *(f"head_dims-{sizes}" for sizes in ("16x16", "40x24", "80x80", "1x27", "24x513")),
    *(f"axes-{name}" for name in ("none", "three_batch_axes", "grouped")),
    *(
        "scale--0.5",
        "scale-0.0",
        "layout-mixed-heads",
        "layout-packed-no_heads",
        "layout-misaligned-heads",
        "layout-column_major-wide",
    ),
    *("blind-grouped", "blind-no_keys", "empty-queries-top_left", "empty-heads-full"),
}


# The budget is made from naive, so all that it can show there is a NaN: one dtype is enough, but none of 16 bits, as
# naive's scores, and so its log-sum-exp, have those.
@pytest.mark.parametrize("name", named(CASES, FAST))
@each_dtype(flash=FLOATS, tiled=(FLOAT, HALF, torch.bfloat16, DOUBLE), naive=(FLOAT,))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, name):
    case = CASES[name]
    check(impl, case.inputs(dtype, device), **case.settings)


def torch_computes(name: str) -> bool:
    case = CASES[name]
    sees_keys = case.causal not in (True, "bottom_right") or case.shapes.q[-2] <= case.shapes.k[-2]
    return "empty" not in name and "blind" not in name and sees_keys


def chosen() -> Iterator[Any]:
    for name in CASES:
        for impl, dtype in [("auto", FLOAT), *[("sdpa", FLOAT), ("sdpa", HALF)] * torch_computes(name)]:
            marks = [slow] * (name not in FAST or dtype is HALF)
            yield pytest.param(impl, dtype, name, id=f"{impl}-{dtype.itemsize}-{name}", marks=marks)


@pytest.mark.parametrize(("impl", "dtype", "name"), [*chosen()])
def test_the_implementation_chosen_is_within_the_budget(impl, dtype, device, name):
    """Torch's own is called rightly: the mask's alignment, the scale, groups of heads, any axes. It returns no lse."""
    case = CASES[name]
    inputs = case.inputs(dtype, device)
    results = evaluate(partial(attention, **case.settings, impl=impl), inputs)
    assert_within_budget(results, inputs, **case.settings)


@slow
@pytest.mark.parametrize("name", ["blind-grouped-negated", "empty-keys-full"])
def test_the_compiled_implementation_is_within_the_budget(device, name):
    """On a few: each is compiled, which takes longer than to compute all others."""
    case, inputs = CASES[name], CASES[name].inputs(FLOAT, device)
    results = evaluate(partial(attention, **case.settings, impl="compiled", return_lse=True), inputs)
    assert_within_budget(results, inputs, **case.settings)


def test_tiled_masks_the_right_tiles_wherever_the_diagonal_lies(device):
    """One hidden key in a tile that is taken for a visible one shows for a single difference of lengths."""
    for k_len in range(1, 70):
        q, k, v, *_ = make_inputs(Shapes.of(1, q_len=40, k_len=k_len, d=4), dtype=DOUBLE, device=device)
        out, exact = (attention(q, k, v, causal=True, impl=impl) for impl in ("tiled", "naive"))
        torch.testing.assert_close(out, exact, msg=lambda text, k_len=k_len: f"{k_len} keys: {text}")


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", [1e3, 1e4])
def test_scores_in_the_millions_make_no_weight_infinite(flash_device, dtype, causal, factor):
    """Rounded one way for the maximum and another way for the weights, they would exceed it, on a GPU, or all be 0."""
    q, k = (factor * torch.randn(4, 130, 64, dtype=dtype, device=flash_device) for _ in "qk")
    v = torch.ones_like(k)
    out = attention(q, k, v, causal=causal, impl="flash")
    torch.testing.assert_close(out, v)
