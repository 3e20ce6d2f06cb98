"""Operation counts and peak rates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.profiling.flops import (
    attention_bytes,
    attention_flops,
    attention_parts_flops,
    device_peak,
    implausible_rate,
    teraflops_per_second,
)


def test_the_forward_is_two_products():
    assert attention_flops(2, 3, 5, 7, 11) == 4 * 2 * 3 * 5 * 7 * 11


def test_the_forward_agrees_with_torchs_counter():
    q, k, v = (torch.randn(2, 3, length, 16) for length in (32, 48, 48))
    with FlopCounterMode(display=False) as counter:
        torch.softmax(q @ k.transpose(-1, -2), -1) @ v
    assert attention_flops(2, 3, 32, 48, 16) == counter.get_total_flops()


@pytest.mark.parametrize(("which", "factor"), [("forward", 1), ("backward", 2.5), ("both", 3.5)])
@pytest.mark.parametrize(("causal", "visible"), [(False, 1), (True, 0.5)])
def test_masks_and_passes(which, factor, causal, visible):
    flops = attention_flops(1, 16, 1024, 1024, 128, causal=causal, which=which)
    assert flops == 4 * 16 * 1024**2 * 128 * factor * visible


def test_values_of_another_width():
    assert attention_flops(1, 1, 4, 4, 8, value_dim=24) == 2 * 16 * (8 + 24)


class TestParts:
    def test_forward(self):
        parts = attention_parts_flops(2, 3, 5, 7, 11)
        pairs = 2 * 3 * 5 * 7
        assert (parts.scores, parts.values) == (2 * pairs * 11, 2 * pairs * 11)
        assert (parts.mask, parts.softmax) == (pairs, 5 * pairs)
        assert parts.softmax_over_products == pytest.approx(5 / 44)

    def test_products_agree_with_torchs_counter_in_both_passes(self):
        q, k, v = (torch.randn(2, 3, 32, 16, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as counter:
            out = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
            forward = counter.get_total_flops()
            out.sum().backward()
        for which, expected in {
            "forward": forward,
            "both": counter.get_total_flops(),
            "backward": counter.get_total_flops() - forward,
        }.items():
            parts = attention_parts_flops(2, 3, 32, 32, 16, which=which)
            assert parts.scores + parts.values == expected

    def test_backward_and_both(self):
        forward, backward, both = (
            attention_parts_flops(1, 4, 8, 8, 16, which=which) for which in ("forward", "backward", "both")
        )
        assert backward.softmax == 4 * backward.mask == 4 * 4 * 64
        for name in ("scores", "mask", "softmax", "values"):
            assert getattr(forward, name) + getattr(backward, name) == getattr(both, name)

    def test_impossible_sizes_and_passes_are_refused(self):
        with pytest.raises(ValueError, match="batch must not be negative; got -1"):
            attention_parts_flops(-1, 1, 4, 4, 8)
        with pytest.raises(ValueError, match="which must be one of forward, backward, both; got 'up'"):
            attention_parts_flops(1, 1, 4, 4, 8, which="up")

    def test_without_pairs_there_is_no_ratio(self):
        assert math.isnan(attention_parts_flops(1, 1, 0, 0, 8).softmax_over_products)


def test_impossible_sizes_and_passes_are_refused():
    with pytest.raises(ValueError, match="heads must not be negative; got -1"):
        attention_flops(1, -1, 4, 4, 8)
    with pytest.raises(ValueError, match="which must be one of forward, backward, both; got 'sideways'"):
        attention_flops(1, 1, 4, 4, 8, which="sideways")


def test_the_least_bytes_are_those_of_the_tensors():
    sizes = {"batch": 2, "heads": 6, "query_length": 5, "key_length": 7, "head_dim": 8, "kv_heads": 3}
    q, k = torch.zeros(2, 6, 5, 8, dtype=torch.bfloat16), torch.zeros(2, 3, 7, 8, dtype=torch.bfloat16)
    v, out = k, q
    forward = sum(x.nbytes for x in (q, k, v, out))
    backward = forward + sum(x.nbytes for x in (out, q, k, v))  # the gradients
    assert attention_bytes(**sizes, itemsize=2) == forward
    assert attention_bytes(**sizes, itemsize=2, which="backward") == backward
    assert attention_bytes(**sizes, itemsize=2, which="both") == forward + backward
    with pytest.raises(ValueError, match="which must be one of forward, backward, both; got 'step'"):
        attention_bytes(**sizes, itemsize=2, which="step")


def test_a_rate():
    assert teraflops_per_second(5e12, 10.0) == pytest.approx(500.0)
    with pytest.raises(ValueError, match="milliseconds must be positive; got 0"):
        teraflops_per_second(1.0, 0)


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
    ],
)
def test_peaks_by_name(name, half):
    peak = device_peak(name)
    assert peak is not None
    assert peak.of("bfloat16", tf32=False) == peak.of("float16", tf32=True) == half
    assert peak.of("float64", tf32=False) is None


def test_an_unknown_device_has_no_peak():
    assert device_peak("AMD EPYC") is None
    assert implausible_rate(1e9, "AMD EPYC", "float32", tf32=False) is None


def test_rates_above_the_peak_are_told():
    assert implausible_rate(780, "NVIDIA H200", "bfloat16", tf32=False) is None
    told = implausible_rate(1200, "NVIDIA H200", "bfloat16", tf32=False)
    assert told == "1200 TFLOP/s is above the 990 TFLOP/s that NVIDIA H200 can reach in bfloat16"


def test_float32_above_its_own_peak_ran_as_tf32():
    assert implausible_rate(100, "NVIDIA H200", "float32", tf32=True) is None
    told = implausible_rate(100, "NVIDIA H200", "float32", tf32=False)
    assert told is not None
    assert "in narrower numbers" in told
    assert "float32 with TF32" in (implausible_rate(600, "NVIDIA H200", "float32", tf32=True) or "")
