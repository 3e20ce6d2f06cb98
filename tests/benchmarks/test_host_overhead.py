"""The benchmark of host time."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from benchmarks import host_overhead
from benchmarks.host_overhead import HostCase, make_call

from .small_models import run_here

SHAPE = ["--lengths", "16", "--head-dims", "8", "--heads", "2", "--dtypes", "fp32", "--masks", "causal"]
SMALL = [*SHAPE, "--device", "cpu", "--calls", "2", "--rounds", "2"]


def test_every_provider_that_can_is_compared_with_torch(monkeypatch, tmp_path):
    providers = ["torch", "naive", "imaginary"]
    run_here(monkeypatch, host_overhead.main, tmp_path, *SMALL, "--providers", *providers)
    frame = pd.read_csv(tmp_path / "results.csv")
    expected = [(which, name) for which in ("forward", "recorded", "backward") for name in providers]
    assert list(zip(frame["which"], frame["provider"], strict=True)) == expected
    ok = frame[frame["provider"] != "imaginary"]
    assert set(ok["status"]) == {"ok"}
    assert (ok["min_us"] > 0).all()
    assert (ok["min_us"] <= ok["median_us"]).all()
    assert set(ok[ok["provider"] == "torch"]["over_torch"]) == {1.0}
    assert set(frame[frame["provider"] == "imaginary"]["status"]) == {"unsupported"}
    text = (tmp_path / "tables.md").read_text()
    assert "## float32, causal, q (1, 2, 16, 8)" in text
    assert "- imaginary: unsupported: impl must be one of" in text
    assert "- the median over 2 rounds of 2 calls in a row" in text


def test_ratios_are_above_one_when_slower():
    rows = [
        {"provider": name, "which": "forward", "median_us": 1e3 * ms, "over_torch": ms / 2.0, "status": "ok"}
        | {"over_torch_low": ms / 2.5, "over_torch_high": ms / 1.5}
        for name, ms in (("torch", 2.0), ("naive", 3.0))
    ]
    sizes = {"dtype": "float32", "mask": "full", "batch": 1, "heads": 2, "length": 16, "head_dim": 8}
    text = host_overhead.tables(pd.DataFrame([row | sizes for row in rows]))
    assert [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]] == ["naive", "3000", "1.50 (1.20 to 2.00)"]


@pytest.mark.parametrize("which", ["forward", "recorded", "backward"])
def test_a_call_is_one_pass(which):
    case = HostCase("float32", "causal", batch=1, heads=2, length=4, head_dim=8, which=which)
    tensors = [torch.randn(1, 2, 4, 8, requires_grad=which != "forward") for _ in range(3)]
    call = make_call("naive", case, tensors)
    if which == "backward":
        assert [x.shape for x in call()] == [x.shape for x in tensors]
        assert all(x.grad is None for x in tensors)
    else:
        assert call().requires_grad == (which == "recorded")
        torch.testing.assert_close(call(), make_call("torch", case, tensors)())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_host_time_on_a_gpu(tmp_path):
    assert host_overhead.main(["--rounds", "3", "--out", str(tmp_path)]) == 0
    frame = pd.read_csv(tmp_path / "results.csv")
    assert set(frame[frame["provider"] == "flash"]["status"]) == {"ok"}
