"""The benchmark of features: every case runs, rows and tables say what was measured, and failures are rows too."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import features


@pytest.fixture
def benchmark(tmp_path):
    """Runs the command with these arguments; returns the rows of the CSV file and the text of the tables."""

    def run(*arguments):
        assert features.main([*arguments, "--device", "cpu", "--rounds", "1", "--output", str(tmp_path)]) == 0
        with (tmp_path / "results.csv").open() as file:
            return [*csv.DictReader(file)], (tmp_path / "tables.md").read_text()

    return run


def test_every_case_is_measured(benchmark):
    rows, tables = benchmark("--length", "48", "--dims", "8", "--dtype", "fp32", "--impl", "tiled")
    assert [(row["case"], row["pass"]) for row in rows] == [
        (case, which) for case in features.CASES for which in features.PASSES
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["median_ms"]) > 0 for row in rows)
    for case in features.CASES:
        assert f"| {case}, forward" in tables


def test_the_backward_reaches_what_was_learned(monkeypatch):
    """Else a bias with a gradient would cost what one without does."""
    sizes = features.Sizes(1, 2, 16, 8)
    ours, _, leaves = features.CASES["learned_bias"](sizes, torch.device("cpu"), torch.float32)
    tensors = [torch.randn(tuple(sizes), requires_grad=True) for _ in "qkv"]
    gradients = features.run_of(ours, tensors, leaves, "backward")()
    assert [tuple(x.shape) for x in gradients] == [tuple(sizes)] * 3 + [(2, 16, 16)]


def test_what_cannot_be_measured_is_a_row_with_the_reason(benchmark, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, tables = benchmark("--cases", "softcap", "--passes", "forward", "--length", "16", "--impl", "flash")
    assert [(row["median_ms"], row["status"][:40]) for row in rows] == [
        ("", "impl='flash' cannot compute this call: i")
    ]
    assert "- ours softcap, forward, d 64: impl='flash' cannot compute" in tables


@pytest.mark.gpu
@pytest.mark.parametrize("case", features.CASES)
def test_flex_attention_computes_the_same(case):
    """What is compared in time is one and the same function."""
    sizes, device = features.Sizes(1, 2, 512, 64), torch.device("cuda")
    tensors = [torch.randn(tuple(sizes), device=device, dtype=torch.float16) for _ in "qkv"]
    ours, theirs, _ = features.CASES[case](sizes, device, torch.float16)
    if theirs is None:
        pytest.skip("FlexAttention has no such thing")
    assert (ours(*tensors, impl="flash") - theirs(*tensors)).abs().max() < 0.02
