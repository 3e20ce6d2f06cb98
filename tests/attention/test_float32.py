"""float32 inputs: what torch's precision setting means, and magnitudes beyond those of float16."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.testing import (
    TF32_EPS,
    Shapes,
    assert_within_budget,
    compare,
    evaluate,
    make_inputs,
    naive_results,
    oracle,
    terms,
)

from .helpers import FLOATS, each_function, slow

SHAPES = {
    "heads": Shapes.of(1, q_len=70, k_len=100, d=64, dv=40, q_heads=2, kv_heads=1),
    "no_heads": Shapes.of(1, q_len=129, d=16),
}
PRECISIONS = [
    pytest.param("highest", "heads", True, marks=pytest.mark.every_triton),
    ("highest", "no_heads", False),
    ("high", "heads", False),
    ("high", "no_heads", True),
    ("medium", "no_heads", True),
]


@each_function
@pytest.mark.parametrize(("matmul_precision", "shapes", "causal"), PRECISIONS, indirect=["matmul_precision"])
def test_the_precision_setting_is_met(impl, device, matmul_precision, shapes, causal):
    inputs = make_inputs(SHAPES[shapes], device=device)
    results = evaluate(partial(attention, causal=causal, impl=impl, return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=causal, eps=None if matmul_precision == "highest" else TF32_EPS)


def test_the_setting_of_the_moment_counts(flash_device):
    """Calls are remembered: one in TF32 must not make the next one inexact."""
    inputs = make_inputs(Shapes.of(1, q_len=33, d=32), device=flash_device)
    exact, summed = oracle(inputs), terms(inputs)
    within = []
    for precision in ("highest", "high", "highest", "medium", "highest"):
        torch.set_float32_matmul_precision(precision)
        results = evaluate(partial(attention, impl="flash", return_lse=True), inputs)
        torch.set_float32_matmul_precision("highest")
        findings = compare(results, exact, naive_results(inputs), summed)
        within.append(all(finding.holds for finding in findings))
    assert within == [True, False, True, False, True]


@pytest.mark.parametrize("matmul_precision", ["highest"], indirect=True)
@pytest.mark.parametrize("d", [16, pytest.param(64, marks=slow)])
class TestOneLargeRow:
    """What a row far larger than the others costs these: the bound that docs/kernels.md states."""

    ROW, SMALLEST = 17, 2.0**-39

    def others(self, x):
        return torch.cat([x[..., : self.ROW, :], x[..., self.ROW + 1 :, :]], -2)

    def made(self, name, value, d, device):
        inputs = make_inputs(Shapes.of(1, q_len=35, k_len=150, d=d, q_heads=1), device=device)
        x = getattr(inputs, name).clone()
        x[..., self.ROW, 3] = value
        inputs = inputs._replace(**{name: x})
        return inputs, evaluate(partial(attention, impl="flash", return_lse=True), inputs), oracle(inputs)

    def test_of_q(self, flash_device, matmul_precision, d):
        inputs, results, exact = self.made("q", 1e8, d, flash_device)
        scores = 1e8 * self.SMALLEST * inputs.k.abs().sum(-1).max() / d**0.5
        error = self.others((results["out"] - exact["out"]).abs()).max()
        assert error < 2 * scores * inputs.v.abs().max()

    def test_of_k(self, flash_device, matmul_precision, d):
        inputs, results, exact = self.made("k", 1e8, d, flash_device)
        scores = 1e8 * self.SMALLEST * inputs.q.abs().sum(-1).max() / d**0.5
        for name in ("out", "dq", "dk", "dv"):
            error = (results[name] - exact[name]).abs().max()
            assert error < 2 * scores * exact[name].abs().max(), name

    def test_of_dout(self, flash_device, matmul_precision, d):
        inputs, results, exact = self.made("dout", 1e6, d, flash_device)
        score_gradient = 2 * inputs.dout.norm(dim=-1).max() * inputs.v.norm(dim=-1).max() * self.SMALLEST
        error = self.others((results["dq"] - exact["dq"]).abs()).max()
        assert error < score_gradient * inputs.k.abs().sum(-2).max() / d**0.5


@each_function
@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("factor", [pytest.param(0.0, marks=slow), 1e-3, pytest.param(1.0, marks=slow), 60.0])
def test_scores_of_half_precision_inputs_are_float32(impl, device, dtype, factor):
    """So neither tiny ones nor ones that float16 cannot hold are lost: the yardstick is naive in float32, rounded."""
    inputs = make_inputs(Shapes.of(2, q_len=40, k_len=70, d=16), dtype=dtype, device=device)
    inputs = inputs._replace(q=inputs.q * factor, k=inputs.k * factor)
    results = evaluate(partial(attention, causal=True, impl=impl, return_lse=True), inputs)
    naive = naive_results(inputs.to(torch.float32), causal=True)
    rounded = {name: x.to(results[name].dtype) for name, x in naive.items()}
    findings = compare(results, oracle(inputs, causal=True), rounded, terms(inputs, causal=True))
    assert all(finding.holds for finding in findings), "\n".join(map(str, findings))
