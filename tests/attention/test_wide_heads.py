"""Head dimensions wider than a tile: products in slices, and a slice of the results for each program."""

from __future__ import annotations

import pytest

from cs336_systems.testing import Shapes, make_inputs, make_packed

from .features import Maker
from .helpers import BFLOAT, FLOAT, FLOATS, check, check_packed, each_dtype, named, sizes_of, slow

WIDTHS = {"576x512": (576, 512), "300x270": (300, 270), "24x513": (24, 513), "257x8": (257, 8), "1024": (1024, 1024)}


@pytest.mark.parametrize("widths", named(WIDTHS, ["24x513"]))
@each_dtype(flash=FLOATS, tiled=(FLOAT,))
def test_values_and_gradients_are_within_the_budget(impl, dtype, device, widths):
    d, dv = WIDTHS[widths]
    shapes = Shapes.of(1, q_len=37, k_len=45, d=d, dv=dv, q_heads=2, kv_heads=1)
    check(impl, make_inputs(shapes, dtype=dtype, device=device), causal=True)


@pytest.mark.parametrize(
    "layout", named(["length_before_heads", "padded_rows", "column_major", "misaligned"], ["column_major"])
)
def test_any_arrangement_in_memory(flash_device, layout):
    check("flash", make_inputs(Shapes.of(2, q_len=20, d=300), device=flash_device, layout=layout))


@slow
def test_with_features(flash_device):
    """A negative scale, which narrower heads take into q's tile, and sums that every slice's programs make."""
    shapes = Shapes.of(1, q_len=35, k_len=40, d=264, dv=520, q_heads=2, kv_heads=1)
    make = Maker(sizes_of(shapes), FLOAT, flash_device)
    features = make.bias("hqk") | make.slopes() | make.sinks() | {"window": (20, 5)}
    check("flash", make_inputs(shapes, device=flash_device), features, scale=-0.05)


def test_packed(flash_device):
    lengths = [(3, 5), (0, 2), (18, 20)]
    check_packed("flash", make_packed(lengths, d=272, dv=264, beyond=2, device=flash_device), lengths, True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT], ids=["bfloat16", "float32"])
def test_long_sequences(dtype):
    shapes = Shapes.of(1, q_len=700, k_len=1000, d=576, dv=512, q_heads=4, kv_heads=1)
    check("flash", make_inputs(shapes, dtype=dtype, device="cuda"), causal=True)
