"""Head dimensions wider than a tile: products in slices, and a slice of the results for each program."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention, attention_varlen, explain
from cs336_systems.testing import (
    Shapes,
    assert_packed_within_budget,
    assert_within_budget,
    evaluate,
    make_inputs,
    make_packed,
    poisoned_memory,
    starts_of,
)

WIDTHS = [(576, 512), (300, 270), (24, 513), (257, 8), (1024, 1024)]
IMPLEMENTATIONS = [
    pytest.param(impl, dtype, id=f"{impl}-{str(dtype).removeprefix('torch.')}")
    for impl, dtypes in {
        "flash": (torch.float16, torch.bfloat16, torch.float32),
        "tiled": (torch.float32,),
    }.items()
    for dtype in dtypes
]


@pytest.mark.parametrize(("d", "dv"), WIDTHS)
@pytest.mark.parametrize(("impl", "dtype"), IMPLEMENTATIONS)
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, d, dv):
    shapes = Shapes.of(1, q_len=37, k_len=45, d=d, dv=dv, q_heads=2, kv_heads=1)
    inputs = make_inputs(shapes, dtype=dtype, device=device)
    with poisoned_memory():
        results = evaluate(partial(attention, causal=True, impl=impl, return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=True)


@pytest.mark.parametrize("layout", ["length_before_heads", "padded_rows", "column_major", "misaligned"])
def test_any_arrangement_in_memory(flash_device, layout):
    inputs = make_inputs(Shapes.of(2, q_len=20, d=300, q_heads=2), device=flash_device, layout=layout)
    assert_within_budget(evaluate(partial(attention, impl="flash", return_lse=True), inputs), inputs)


@pytest.mark.parametrize("scale", [-0.05, 0.0])
def test_with_features(flash_device, scale):
    """A negative scale, which narrower heads take into q's tile, and sums that every slice's programs make."""
    inputs = make_inputs(Shapes.of(2, q_len=35, k_len=40, d=264, dv=520, q_heads=2, kv_heads=1), device=flash_device)
    of_all = {"device": flash_device, "requires_grad": True}
    features = {
        "bias": torch.randn(1, 2, 35, 40, **of_all),
        "alibi_slopes": torch.rand(2, **of_all),
        "sinks": torch.randn(2, **of_all),
        "window": (20, 5),
    }
    results = evaluate(partial(attention, scale=scale, impl="flash", return_lse=True), inputs, features)
    assert_within_budget(results, inputs, scale=scale, features=features)


def test_packed(flash_device):
    lengths = [(3, 5), (30, 41), (0, 2)]
    inputs = make_packed(lengths, d=272, dv=264, beyond=2, device=flash_device)
    starts = dict(
        zip(
            ("cu_seqlens_q", "cu_seqlens_k"),
            [starts_of(x, flash_device) for x in zip(*lengths, strict=True)],
            strict=True,
        )
    )
    results = evaluate(partial(attention_varlen, causal=True, impl="flash", return_lse=True, **starts), inputs)
    assert_packed_within_budget(results, inputs, lengths, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_long_sequences(dtype):
    shapes = Shapes.of(1, q_len=700, k_len=1000, d=576, dv=512, q_heads=4, kv_heads=1)
    inputs = make_inputs(shapes, dtype=dtype, device="cuda")
    results = evaluate(partial(attention, causal=True, impl="flash", return_lse=True), inputs)
    assert_within_budget(results, inputs, causal=True)


def test_the_widest():
    q = torch.zeros(1, 2, 3, 1025)
    assert "its head dimensions go up to 1024; got 1025" in str(explain(q, q, q))
