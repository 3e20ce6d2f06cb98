"""One table of calls, and every implementation on each: values and gradients against float64, within the budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import LAYOUTS, Shapes, assert_within_budget, evaluate, make_inputs

from .helpers import DOUBLE, FLOAT, FLOATS, HALF, check, each_dtype, slow


@dataclass(frozen=True)
class Case:
    """A call of `attention`."""

    name: str
    shapes: Shapes
    causal: bool | str = False
    scale: float | None = None
    layout: str = "contiguous"


def cases() -> Iterator[Case]:
    # One more and one less than a tile, alone and against other lengths, under every mask that is another one.
    for q_len, k_len in [(1, 1), (63, 63), (127, 127), (129, 129), (63, 129), (1, 127), (129, 63), (127, 1)]:
        for causal in (False, "top_left") if q_len == k_len else (False, "top_left", "bottom_right"):
            shapes = Shapes.of(1, q_len=q_len, k_len=k_len, d=16)
            yield Case(f"lengths-{q_len}x{k_len}-{causal or 'full'}", shapes, causal)
    # Every head dimension that kernels pad differently, and values wider and narrower than keys.
    same = [(d, d) for d in (1, 16, 40, 64, 80, 96, 128, 192, 256)]
    # Of the second and third ptxas 12.8 lost the address of a tile (see docs/kernels.md).
    for d, dv in (*same, (1, 3), (1, 27), (19, 9), (40, 24), (64, 128), (128, 64), (16, 256), (192, 128)):
        yield Case(f"head_dims-{d}x{dv}", Shapes.of(1, q_len=33, k_len=67, d=d, dv=dv), True)
    # Any number of leading axes, and key heads that serve groups of query heads.
    axes = {
        "none": ((), {}),
        "batch": ((3,), {}),
        "heads": ((2,), {"q_heads": 3}),
        "two_batch_axes": ((2, 1), {"q_heads": 2}),
        "three_batch_axes": ((1, 2, 2), {"q_heads": 2, "kv_heads": 1}),
        "grouped": ((2,), {"q_heads": 6, "kv_heads": 2}),
        "multi_query": ((2,), {"q_heads": 4, "kv_heads": 1}),
    }
    for name, (leading, heads) in axes.items():
        for causal in (True, False) if name == "grouped" else (True,):
            shapes = Shapes.of(*leading, q_len=35, k_len=37, d=24, **heads)
            yield Case(f"axes-{name}-{'causal' if causal else 'full'}", shapes, causal)
    shapes = Shapes.of(1, q_len=20, k_len=70, d=8, q_heads=2, kv_heads=1)
    for scale in (0.3, -0.5, 0.0, 1, 1e-30):
        yield Case(f"scale-{scale}", shapes, "bottom_right", scale)
    # Every arrangement in memory with heads in groups, and those that are another one without a head axis.
    shapes = Shapes.of(2, q_len=35, k_len=35, d=24, dv=40, q_heads=4, kv_heads=2)
    for layout in LAYOUTS:
        yield Case(f"layout-{layout}-heads", shapes, "top_left", layout=layout)
    for layout in ("length_before_heads", "column_major", "kv_shared_by_heads", "packed"):
        yield Case(f"layout-{layout}-no_heads", Shapes.of(3, q_len=35, k_len=35, d=20), "top_left", layout=layout)
    # Queries that see no key, in some tiles, in part of one, and all of them.
    shapes = Shapes.of(1, q_len=140, k_len=9, d=16)
    grouped = Shapes.of(1, q_len=20, k_len=7, d=16, q_heads=4, kv_heads=2)
    for sign, factor in (("", None), ("-negated", -1.0)):
        yield Case(f"blind-some_tiles{sign}", shapes, "bottom_right", factor)
        yield Case(f"blind-grouped{sign}", grouped, "bottom_right", factor)
    yield Case("blind-no_keys", Shapes.of(2, q_len=5, k_len=0, d=16, q_heads=2), "bottom_right")
    for name, shapes in {
        "queries": Shapes.of(2, q_len=0, k_len=5, d=16, q_heads=2),
        "keys": Shapes.of(2, q_len=5, k_len=0, d=16, dv=8),
        "both": Shapes.of(2, q_len=0, k_len=0, d=16),
        "batch": Shapes.of(0, q_len=5, k_len=5, d=16, q_heads=2),
        "heads": Shapes.of(2, q_len=5, k_len=5, d=16, q_heads=0),
    }.items():
        for causal in (False, "top_left"):
            yield Case(f"empty-{name}-{causal or 'full'}", shapes, causal)


CASES = [*cases()]
FAST = {
    *(f"lengths-{sizes}" for sizes in ("1x1-full", "63x129-bottom_right", "129x63-top_left")),
    *(f"head_dims-{sizes}" for sizes in ("16x16", "40x24", "80x80", "1x27")),
    *(f"axes-{name}-causal" for name in ("none", "three_batch_axes", "grouped")),
    *("scale--0.5", "scale-0.0", "layout-mixed-heads", "layout-packed-no_heads", "layout-misaligned-heads"),
    *("blind-grouped", "blind-no_keys", "empty-queries-top_left", "empty-heads-full"),
}


def params(cases):
    """Cases as parameters, most of them slow."""
    return [pytest.param(case, id=case.name, marks=[slow] * (case.name not in FAST)) for case in cases]


# The budget is made from naive, so all that it can show there is a NaN: one dtype is enough, but none of 16 bits, as
# naive's scores, and so its log-sum-exp, have those.
@pytest.mark.parametrize("case", params(CASES))
@each_dtype(flash=FLOATS, tiled=(FLOAT, HALF, torch.bfloat16, DOUBLE), naive=(FLOAT,))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, case):
    inputs = make_inputs(case.shapes, dtype=dtype, device=device, layout=case.layout)
    check(impl, inputs, causal=case.causal, scale=case.scale)


def without_lse(impl, dtype, device, case):
    """The same without a log-sum-exp, which torch's own attention does not return."""
    inputs = make_inputs(case.shapes, dtype=dtype, device=device, layout=case.layout)
    results = evaluate(partial(attention, causal=case.causal, scale=case.scale, impl=impl), inputs)
    assert_within_budget(results, inputs, causal=case.causal, scale=case.scale)


@pytest.mark.parametrize("case", params(CASES))
def test_the_implementation_chosen_is_within_the_budget(device, case):
    without_lse("auto", FLOAT, device, case)


def torch_computes(case: Case) -> bool:
    sees_keys = case.causal not in (True, "bottom_right") or case.shapes.q[-2] <= case.shapes.k[-2]
    return "empty" not in case.name and "blind" not in case.name and sees_keys


@pytest.mark.parametrize("case", params(filter(torch_computes, CASES)))
@pytest.mark.parametrize("dtype", [pytest.param(HALF, marks=slow), FLOAT])
def test_torch_s_own_computes_the_same(dtype, device, case):
    """That it is called rightly: the mask's alignment, the scale, groups of heads, any axes."""
    without_lse("sdpa", dtype, device, case)


@slow
@pytest.mark.parametrize("name", ["blind-grouped-negated", "empty-keys-full"])
def test_the_compiled_implementation_is_within_the_budget(device, name):
    """On a few: each is compiled, which takes longer than to compute all others."""
    (case,) = (case for case in CASES if case.name == name)
    inputs = make_inputs(case.shapes, device=device, layout=case.layout)
    attend = partial(attention, causal=case.causal, scale=case.scale, impl="compiled", return_lse=True)
    assert_within_budget(evaluate(attend, inputs), inputs, causal=case.causal, scale=case.scale)


def test_tiled_masks_the_right_tiles_wherever_the_diagonal_lies(device):
    """One hidden key in a tile that is taken for a visible one shows for a single difference of lengths."""
    for k_len in range(1, 70):
        q, k, v, *_ = make_inputs(Shapes.of(1, q_len=40, k_len=k_len, d=4), dtype=DOUBLE, device=device)
        out, exact = (attention(q, k, v, causal=True, impl=impl) for impl in ("tiled", "naive"))
        torch.testing.assert_close(out, exact, msg=lambda text, k_len=k_len: f"{k_len} keys: {text}")


def test_the_table_names_each_case_once():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= FAST


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("factor", [1e3, 1e4])
def test_scores_in_the_millions_make_no_weight_infinite(flash_device, dtype, causal, factor):
    """Rounded one way for the maximum and another way for the weights, they would exceed it, on a GPU, or all be 0."""
    q, k = (factor * torch.randn(4, 130, 64, dtype=dtype, device=flash_device) for _ in "qk")
    v = torch.ones_like(k)
    out = attention(q, k, v, causal=causal, impl="flash")
    torch.testing.assert_close(out, v)
