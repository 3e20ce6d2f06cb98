"""Rooflines: where a row stands by its operations a byte, and what its device can reach there."""

from __future__ import annotations

import pytest

from benchmarks.attention_roofline import draw_rooflines, intensity, roof_of
from cs336_systems.profiling.flops import attention_flops, device_peak, teraflops_per_second

H200 = "NVIDIA H200"


def row(length, which="forward", dtype="bfloat16", *, mask="full", heads=16, kv_heads=16, device=H200, ms=2.0):
    flops = attention_flops(2, heads or 1, length, length, 64, causal=mask == "causal", which=which)
    return {
        "device": device,
        "implementation": "flash",
        "pass": which,
        "dtype": dtype,
        "mask": mask,
        "batch": 2,
        "heads": heads,
        "kv_heads": kv_heads,
        "length": length,
        "head_dim": 64,
        "median_ms": ms,
        "tflops": None if ms is None else teraflops_per_second(flops, ms),
    }


@pytest.mark.parametrize(
    ("of", "operations"),
    [
        # 4 N² d operations forward, and q, k, v and the output of N d elements each: N by the bytes of an element.
        (row(1024), 512),
        (row(1024, dtype="float32"), 256),
        (row(1024, mask="causal"), 256),
        (row(1024, heads=0, kv_heads=0), 512),
        (row(1024, kv_heads=4), 512 * 2 / (1 + 1 / 4)),
        # 2.5 times the operations, and twice the tensors.
        (row(1024, "backward"), 512 * 2.5 / 2),
        (row(1024, "both"), 512 * 3.5 / 3),
    ],
)
def test_operations_a_byte(of, operations):
    assert intensity(of) == pytest.approx(operations)


def test_the_roof_of_a_dtype():
    peak = device_peak(H200)
    assert roof_of(peak, "bfloat16").peaks == {"bfloat16": 989.5}
    assert roof_of(peak, "float32").peaks == {"float32": 67.0, "TF32": 494.5}
    roof = roof_of(peak, "float16")
    assert (roof.at(989.5, 100), roof.at(989.5, 1000)) == (480, 989.5)


def test_figures_of_devices_with_known_rates(tmp_path):
    rows = [row(length, which) for which in ("forward", "backward") for length in (128, 1024)]
    rows += [row(4096, ms=None), row(128, dtype="float32", mask="causal")]
    names = ["roofline-forward-bfloat16-full", "roofline-backward-bfloat16-full", "roofline-forward-float32-causal"]
    assert draw_rooflines(tmp_path, rows, {"flash": 0}) == [tmp_path / f"{name}.png" for name in names]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)
    assert draw_rooflines(tmp_path, [row(128, device="AMD EPYC")], {"flash": 0}) == []
