"""Values that are hard on a softmax in tiles: every implementation, forward and backward, against float64."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import attention, use_backends
from cs336_systems.testing import Inputs, Results, compare, difference, evaluate, naive_results, oracle, terms

from .adversarial import CASES, Case, D
from .helpers import slow

ON_GPU = torch.cuda.is_available()


def calls() -> list[Any]:
    """Each case for each implementation; a CPU interprets few in 16 bits, whose softmax is written for fused products.

    Naive in 16 bits has scores of 16 bits, whose errors are those of the budget; a softmax of nothing but -inf, which
    overflows, is NaN there as on paper.
    """
    calls = []
    for number, case in enumerate(CASES):
        of_positions = case.name.startswith(("lengths", "window"))
        of_softmax = case.name.startswith(("pivot", "large", "overflow", "nan-q"))
        for dtype in case.dtypes:
            wide = dtype is torch.float32
            interpreted = not of_positions if wide else dtype is torch.float16 and (of_positions or of_softmax)
            kernels = ["flash"] * interpreted
            if ON_GPU:
                # Those for Hopper take differences before they scale them: +inf is a weight of 1 there, not NaN.
                kernels = ["portable", *["flash"] * ("plus" not in case.name)]
            for impl in [
                *kernels,
                *["tiled"] * (wide or not of_positions),
                *["naive"] * (wide and "all_minus" not in case.name),
            ]:
                name = f"{impl}-{str(dtype).removeprefix('torch.')}-{case.name}"
                is_fast = wide and number % 6 == 0 and not of_positions
                calls.append(pytest.param(case, impl, dtype, id=name, marks=[] if is_fast else slow))
    return calls


@pytest.mark.parametrize(("case", "impl", "dtype"), calls())
@pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_values_and_gradients_are_those_of_float64(flash_device, case, impl, dtype):
    inputs = case.inputs(dtype, flash_device)
    with use_backends("triton") if impl == "portable" else nullcontext():
        named = "flash" if impl == "portable" else impl
        results = evaluate(partial(attention, **case.settings, **case.features, impl=named, return_lse=True), inputs)
    # An infinity is none in two float16 parts: docs/kernels.md says so.
    assert_like_float64(case, inputs, results, spoils=named == "flash" and dtype is torch.float32)


# Torch's kernels differ from each other in what an infinity makes of gradients, and add up values before they divide.
FINITE = [case for case in CASES if not case.name.startswith(("inf", "nan", "beyond_sums")) and "plus" not in case.name]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[slow] * (number % 4 > 0))
        for number, case in enumerate(FINITE)
        if not case.features
    ],
)
def test_the_implementation_chosen(device, case):
    """On a CPU torch's kernels, which are chosen only where they are right."""
    inputs = case.inputs(torch.float32, device)
    assert_like_float64(case, inputs, evaluate(partial(attention, **case.settings), inputs))


def assert_like_float64(case: Case, inputs: Inputs, results: Results, *, spoils: bool = False) -> None:
    """Infinities and NaN are where float64 has them, and all other numbers within the budget."""
    expected = rounded(case.expected(oracle, inputs, "lse" in results), inputs.q.dtype)
    spoils = spoils and case.name.startswith("inf-")
    rows = {"lse": (), "dk": (-1,), "dv": (-1,)}
    if case.name.startswith(("nan-", "inf-")):
        rows |= {"dk": (-2, -1), "dv": (-2, -1)}
    problems = [
        name for name, x in results.items() if not has_the_same_kinds(x, expected[name], rows.get(name, (-1,)), spoils)
    ]
    findings = compare(*finite_parts(case, inputs, results, expected))
    if problems or not all(finding.holds for finding in findings):
        lines = [f"infinities or NaN differ: {problems}", *map(str, findings)]
        raise AssertionError("\n".join(lines))


def rounded(exact: Results, dtype: torch.dtype) -> Results:
    """What is beyond the range of its dtype is infinite."""
    made = {}
    for name, x in exact.items():
        largest = torch.finfo(torch.float32 if name == "lse" else dtype).max
        made[name] = torch.where(x.abs() > largest, x * math.inf, x)
    return made


def has_the_same_kinds(x: Tensor, exact: Tensor, rows: tuple[int, ...], spoils: bool) -> bool:
    """Infinities and NaN of the log-sum-exp, which has no ``rows``, are alike; rows of others have some or none.

    Which of their elements depends on whether what is hidden counts as 0 times an infinity, or is left out, and so
    which rows of dk and dv. ``spoils``: more of them may.
    """
    if not rows and not spoils:
        kinds = [torch.stack([y.isnan(), y == math.inf, y == -math.inf]) for y in (x, exact)]
        return torch.equal(*kinds)
    wrong, got = (~(y.isfinite().all(rows) if rows else y.isfinite()) for y in (exact, x))
    return not bool((wrong & ~got).any()) and (spoils or not bool((got & ~wrong).any()))


def finite_parts(case: Case, inputs: Inputs, results: Results, exact: Results) -> tuple[Results, ...]:
    """The arguments of `compare`, with 0 where a result is not finite."""
    settings: dict[str, Any] = {**case.settings, "features": case.features, "return_lse": "lse" in results}
    naive, summed = naive_results(inputs, **settings), case.expected(terms, inputs, "lse" in results)
    moved = case.expected(oracle, shaken(inputs), "lse" in results) if case.features.get("softcap", 1) < 0.1 else None
    parts: tuple[Results, ...] = ({}, {}, {}, {})
    for name, x in results.items():
        right, yardstick = exact[name], naive[name].double()
        # Naive overflows where others do not: then an error of one rounding stands for its.
        coarse = right * (1 + torch.finfo(x.dtype).eps)
        yardstick = torch.where(difference(yardstick, right).isfinite(), yardstick, coarse)
        if moved is not None:
            farther = (moved[name] - right).abs() > (yardstick - right).abs()
            yardstick = torch.where(farther, moved[name], yardstick)
        finite = x.isfinite() & right.isfinite()
        for part, values in zip(parts, (x, right, yardstick.to(x.dtype)), strict=False):
            part[name] = values.masked_fill(~finite, 0.0)
        parts[3][name] = summed[name].masked_fill(~summed[name].isfinite(), 0.0)
    return parts


def shaken(inputs: Inputs) -> Inputs:
    """Float32 kernels keep 22 bits of q and k. A cap far below the scores makes much of the last ones in gradients."""
    q, k = (x.double() * (1 + 2.0**-21 * (2 * torch.rand_like(x, dtype=torch.float64) - 1)) for x in inputs[:2])
    return inputs._replace(q=q, k=k)


def weights_of_the_backward(scores: float, keys: list[int], dtype: torch.dtype, device: torch.device) -> Results:
    """The log-sum-exps, and the probabilities of ``keys``, which have the largest score of every row, from dv.

    Scores are random, ``scores`` to twice that; those of all other keys are 0. dout is the unit matrix.
    """
    q, k, v = (torch.zeros(4, 1, length, D) for length in (D, 150, 150))
    q[..., 0] = math.sqrt(scores / 0.7) * (1 + torch.rand(4, 1, D))
    k[..., keys, 0] = math.sqrt(scores / 0.7)
    dout = torch.eye(D).expand(4, 1, D, D)
    inputs = Inputs(*[x.to(device) for x in (q, k, v, dout, torch.zeros(4, 1, D))]).to(dtype)
    results = evaluate(partial(attention, scale=0.7, impl="flash", return_lse=True), inputs)
    return {"lse": results["lse"].cpu(), "weights": results["dv"][..., keys, :].float().cpu()}


@pytest.mark.parametrize("portable", [False, *[True] * ON_GPU])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scores", [3e3, pytest.param(1e5, marks=slow), pytest.param(1e7, marks=slow), 5e8])
def test_the_backward_has_a_weight_of_one_where_the_forward_has(flash_device, dtype, scores, portable):
    with use_backends("triton") if portable else nullcontext():
        weights = weights_of_the_backward(scores, [17], dtype, flash_device)["weights"]
    torch.testing.assert_close(weights, torch.ones_like(weights), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scores", [3e3, pytest.param(1e5, marks=slow), 1e7, pytest.param(5e8, marks=slow)])
def test_weights_of_ties_are_within_the_documented_bound(flash_device, scores):
    """At large scores the log-sum-exp has no digits left to tell how many keys tie; docs/kernels.md has the bound."""
    lse, weights = weights_of_the_backward(scores, [17, 100], torch.float32, flash_device).values()
    most = (0.5 * torch.exp(8e-7 * lse[..., None, :].double())).clamp(max=1.0)
    assert (weights >= 0.5 * (1 - 1e-6)).all()
    assert (weights <= most * (1 + 1e-6)).all()
