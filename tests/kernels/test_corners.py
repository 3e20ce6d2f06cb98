"""Wherever an edge of the band crosses tiles, each pair is visible or hidden, even in the corner of a tile."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from cs336_systems.attention import attention
from cs336_systems.kernels import launching
from cs336_systems.testing import Inputs, Shapes, evaluate, make_inputs, oracle

from .portable import tiled

pytestmark = pytest.mark.skipif(not launching.INTERPRETED, reason="compiles a kernel for each tile, for nothing")

TILE = 16
SIDES = range(TILE)


def check(inputs: Inputs, causal: bool, window: tuple[int | None, int | None]) -> None:
    """With a bias, whose gradient per pair has its own kernel."""
    q_len, k_len = inputs.q.shape[-2], inputs.k.shape[-2]
    features = {"window": window, "bias": torch.randn(q_len, k_len, requires_grad=True)}
    with tiled(TILE, TILE):
        attend = partial(attention, causal=causal, impl="flash", window=window, return_lse=True)
        results = evaluate(attend, inputs, {"bias": features["bias"]})
    most = 1e-4 if inputs.q.dtype == torch.float32 else 1e-2
    for name, x in oracle(inputs, causal=causal, features=features).items():
        torch.testing.assert_close(
            results[name].double(), x, atol=most, rtol=most, msg=lambda text, name=name: f"{name}, {window}: {text}"
        )


@pytest.mark.parametrize("ahead", SIDES)
def test_a_diagonal(flash_device, ahead):
    inputs = make_inputs(Shapes.of(1, q_len=20, k_len=20 + ahead, d=16), device=flash_device)
    check(inputs, True, (None, None))


@pytest.mark.parametrize("side", SIDES)
def test_the_sides_of_a_window(flash_device, side):
    """In 16 bits, where tiles of rows that see all keys are not masked."""
    inputs = make_inputs(Shapes.of(1, q_len=36, d=16), dtype=torch.float16, device=flash_device)
    check(inputs, False, (side, None))
    check(inputs, False, (None, side))
