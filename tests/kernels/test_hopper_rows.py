"""What the backward for Hopper has computed for each row before it, and of dQ after it."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.kernels.hopper.rows import finish_kernel, prepare_kernel

BATCH, HEADS, ROWS, TILE = 2, 3, 100, 64
PADDED = 128


def strides(x):
    return x.stride()[:3]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("width", [16, 12])
def test_rows_are_prepared(flash_device, width, with_dlse):
    shape = (BATCH, ROWS, HEADS, width)
    out, dout = (torch.randn(shape, device=flash_device, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lse, dlse = (torch.randn(BATCH, HEADS, ROWS, device=flash_device) for _ in range(2))
    lse[0, 1, 5] = -math.inf
    exponents, delta = (torch.full((BATCH * HEADS, PADDED), math.nan, device=flash_device) for _ in range(2))
    sums = torch.full((BATCH * HEADS, PADDED, 16), math.nan, device=flash_device)
    prepare_kernel[(BATCH * HEADS * PADDED // TILE,)](
        *(out, dout, lse, dlse if with_dlse else None, exponents, delta, sums, strides(out), strides(dout)),
        *(HEADS, ROWS, PADDED, width, 16, TILE),
    )
    expected = (out.double() * dout.double()).sum(-1) - (dlse.double() if with_dlse else 0.0)
    torch.testing.assert_close(delta.view(BATCH, HEADS, PADDED)[..., :ROWS].double(), expected, atol=1e-4, rtol=1e-4)
    assert (delta.view(BATCH, HEADS, PADDED)[..., ROWS:] == 0).all()
    of_rows = exponents.view(BATCH, HEADS, PADDED)
    assert of_rows[0, 1, 5] == math.inf
    assert (of_rows[..., ROWS:] == math.inf).all()
    seen = lse.isfinite()
    torch.testing.assert_close(of_rows[..., :ROWS][seen], lse[seen] / math.log(2))
    assert (sums == 0).all()


def as_added(rows):
    """Sums (rows, width) of 64 rows, in the order in which products hold them: registers of 4, then threads."""
    order = torch.empty(64 * rows.shape[1], dtype=rows.dtype)
    for row in range(64):
        for column in range(rows.shape[1]):
            thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
            register = row % 16 // 8 * 2 + column % 2
            order[column // 8 * 512 + thread * 4 + register] = rows[row, column]
    return order


@pytest.mark.parametrize("part", [16, 8])
@pytest.mark.parametrize("width", [16, 12])
def test_sums_become_gradients(flash_device, width, part):
    rows = torch.randn(BATCH * HEADS, PADDED, 16)
    tiles = rows.view(-1, TILE, 16)
    sums = torch.cat([as_added(piece) for tile in tiles for piece in tile.split(part, 1)]).to(flash_device)
    dq = torch.full((BATCH, ROWS, HEADS, width), math.nan, device=flash_device, dtype=torch.float16).transpose(1, 2)
    grid = (BATCH * HEADS * PADDED // TILE,)
    finish_kernel[grid](sums, dq, strides(dq), HEADS, ROWS, PADDED, 0.5, width, 16, part, TILE)
    expected = (rows.view(BATCH, HEADS, PADDED, 16)[..., :ROWS, :width] * 0.5).half()
    torch.testing.assert_close(dq.cpu(), expected)
