"""FLOP counts, bytes by formula, and peak rates."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.attention import attention
from cs336_systems.profiling import measure_memory
from cs336_systems.profiling.flops import (
    attention_bytes,
    attention_flops,
    attention_memory,
    device_peak,
    implausible_rate,
    naive_attention_flops,
    teraflops_per_second,
)


@pytest.mark.parametrize(("which", "factor"), [("forward", 1), ("backward", 2.5), ("both", 3.5)])
@pytest.mark.parametrize(("causal", "visible"), [(False, 1), (True, 0.5)])
def test_attention_is_two_products(which, factor, causal, visible):
    assert attention_flops(2, 3, 5, 7, 11, causal=causal, which=which) == 4 * 210 * 11 * factor * visible


def test_formulas_agree_with_torchs_counter():
    q, k, v = (torch.randn(2, 3, length, 16, requires_grad=True) for length in (32, 48, 48))

    counts = {}
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, impl="naive")
        counts["forward"] = counter.get_total_flops()
        out.sum().backward()
        counts["both"] = counter.get_total_flops()
    counts["backward"] = counts["both"] - counts["forward"]
    assert attention_flops(2, 3, 32, 48, 16) == counts["forward"]
    for which, count in counts.items():
        steps = naive_attention_flops(2, 3, 32, 48, 16, which=which)
        assert steps["scores"] + steps["values"] == count


@pytest.mark.parametrize(("which", "mask", "softmax"), [("forward", 1, 5), ("backward", 1, 4), ("both", 2, 9)])
def test_mask_and_softmax_of_naive_attention(which, mask, softmax):
    steps = naive_attention_flops(2, 3, 5, 7, 11, which=which)
    assert (steps["mask"], steps["softmax"]) == (mask * 210, softmax * 210)


def test_the_least_bytes_are_those_of_the_tensors():
    sizes = {"batch": 2, "heads": 6, "query_length": 5, "key_length": 7, "head_dim": 8, "kv_heads": 3, "itemsize": 2}
    q, k = torch.zeros(2, 6, 5, 8, dtype=torch.bfloat16), torch.zeros(2, 3, 7, 8, dtype=torch.bfloat16)
    forward = 2 * q.nbytes + 2 * k.nbytes
    for number, which in enumerate(("forward", "backward", "both"), 1):
        assert attention_bytes(**sizes, which=which) == number * forward


def test_memory_by_formula():
    # 8 × 16384 × 64 × 4 bytes are 32 MiB; 8 × 16384 × 16384 × 4 bytes are 8 GiB; the log-sum-exp has 0.5 MiB.
    sizes = attention_memory(batch=8, heads=1, length=16384, head_dim=64, itemsize=4)
    tensors = {"inputs": 96, "scores": 8192, "probabilities": 8192, "output": 32}
    saved = {f"saved with {count}": 32 + count * 8192 for count in (3, 2, 1)} | {"saved with 0": 32.5}
    assert {name: size / 2**20 for name, size in sizes.items()} == tensors | saved
    half = attention_memory(batch=2, heads=3, length=10, head_dim=5, itemsize=2)
    assert (half["output"], half["scores"], half["saved with 0"]) == (600, 1200, 600 + 240)


def test_measured_memory_agrees_with_the_formula():
    q, k, v = (torch.randn(2, 3, 64, 16, requires_grad=True) for _ in range(3))
    sizes = attention_memory(2, 3, 64, 16, 4)

    def held(impl):
        usage = measure_memory(lambda: attention(q, k, v, impl=impl), lambda out: None, inputs=[q, k, v], device="cpu")
        return usage.held_bytes

    assert held("tiled") == sizes["saved with 0"]
    assert sizes["saved with 1"] <= held("naive") < sizes["saved with 3"] + sizes["scores"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: attention_flops(1, 1, 4, 4, 8, which="up"), "which must be one of forward, backward, both; got 'up'"),
        (lambda: naive_attention_flops(1, 1, 4, 4, 8, which="up"), "which must be one of forward, backward, both"),
        (lambda: attention_bytes(1, 1, 4, 4, 8, 1, 2, which="step"), "which must be one of forward, backward, both"),
        (lambda: teraflops_per_second(1.0, 0), "milliseconds must be positive; got 0"),
    ],
)
def test_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_peaks_by_name():
    peaks = {"H200": 989.5, "H200 NVL": 835.5, "H100 80GB HBM3": 989.5, "H100 PCIe": 756.5, "A100-SXM4-80GB": 312.0}
    for name, half in peaks.items():
        peak = device_peak(f"NVIDIA {name}")
        assert peak is not None
        assert peak.rate("bfloat16", tf32=False) == peak.rate("float16", tf32=True) == half
        assert peak.rate("float64", tf32=False) is None


@pytest.mark.parametrize(
    ("rate", "dtype", "tf32", "warning"),
    [
        (780, "bfloat16", False, None),
        (1200, "bfloat16", False, "1200 TFLOP/s is above the 990 TFLOP/s peak of NVIDIA H200 in bfloat16"),
        (100, "float32", True, None),
        (600, "float32", True, "600 TFLOP/s is above the 494 TFLOP/s peak of NVIDIA H200 in float32 with TF32"),
        (
            *(100, "float32", False),
            "100 TFLOP/s is above the 67 TFLOP/s peak of NVIDIA H200 in float32: the products ran on tensor cores, in "
            "a narrower format",
        ),
    ],
)
def test_rates_above_the_peak(rate, dtype, tf32, warning):
    assert implausible_rate(rate, "NVIDIA H200", dtype, tf32=tf32) == warning


def test_rates():
    assert teraflops_per_second(5e12, 10.0) == pytest.approx(500.0)
    assert device_peak("AMD EPYC") is None
    assert implausible_rate(1e9, "AMD EPYC", "float32", tf32=False) is None


def test_products_of_v_have_its_columns():
    """S, dQ and dK have the columns of q; the output, dV and dP those of v."""
    products = {"forward": (1, 1), "backward": (3, 2), "both": (4, 3)}
    for which, (wide, narrow) in products.items():
        expected = 2 * 2 * 3 * 5 * 7 * (wide * 11 + narrow * 13)
        assert attention_flops(2, 3, 5, 7, 11, v_head_dim=13, which=which) == expected
    sizes = attention_memory(2, 3, 64, 16, 4, v_head_dim=8)
    assert (sizes["inputs"], sizes["output"]) == (2 * 3 * 64 * 40 * 4, 2 * 3 * 64 * 8 * 4)
    assert attention_bytes(2, 3, 5, 7, 11, 1, 4, v_head_dim=13) == 2 * 4 * (3 * 5 + 7) * (11 + 13)
