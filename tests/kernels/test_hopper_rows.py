"""What the backward for Hopper has computed for each row before it, and of dQ after it."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.kernels.sm90.describe import Packed, Rows, describe_finish, describe_prepare, tiles_of
from cs336_systems.kernels.sm90.rows import finish_kernel, prepare_kernel
from cs336_systems.kernels.versions import compile_options
from cs336_systems.testing import starts_of

BATCH, HEADS, ROWS, TILE = 2, 3, 100, 64
PADDED = FILLED_UP = 128

LENGTHS = [3, 0, 128, 200, 1, 61]
BEYOND = 70
"""Rows after the last of packed sequences."""


def slots(lengths, beyond):
    """The first row of each sequence, how many it has, and where they are filled up; last of those after the last."""
    first = 0
    for number, length in enumerate([*lengths, beyond]):
        yield first, length, (first // FILLED_UP + number) * FILLED_UP
        first += length


def strides(x):
    return x.stride()[:3]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("width", [16, 12])
def test_rows_are_prepared(flash_device, width, with_dlse):
    shape = (BATCH, ROWS, HEADS, width)
    out, dout = (torch.randn(shape, device=flash_device, dtype=torch.float16).transpose(1, 2) for _ in range(2))
    lse, dlse = (torch.randn(BATCH, HEADS, ROWS, device=flash_device) for _ in range(2))
    lse[0, 1, 5], lse[1, 2, 7] = -math.inf, math.inf
    exponents, delta = (torch.full((BATCH * HEADS, PADDED), math.nan, device=flash_device) for _ in range(2))
    sums = torch.full((BATCH * HEADS, PADDED, 16), math.nan, device=flash_device)
    added = torch.full((BATCH * HEADS * PADDED // TILE,), -1, dtype=torch.int32, device=flash_device)
    prepare_kernel[(BATCH * HEADS * PADDED // TILE,)](
        *(
            out,
            dout,
            lse,
            dlse if with_dlse else None,
            exponents,
            delta,
            sums,
            added,
            None,
            strides(out),
            strides(dout),
        ),
        *(HEADS, ROWS, PADDED, 0, width, 16, TILE, FILLED_UP),
        **compile_options(),
    )
    expected = (out.double() * dout.double()).sum(-1) - (dlse.double() if with_dlse else 0.0)
    torch.testing.assert_close(delta.view(BATCH, HEADS, PADDED)[..., :ROWS].double(), expected, atol=2e-6, rtol=2e-6)
    assert (delta.view(BATCH, HEADS, PADDED)[..., ROWS:] == 0).all()
    of_rows = exponents.view(BATCH, HEADS, PADDED)
    assert of_rows[0, 1, 5] == math.inf
    assert of_rows[1, 2, 7].isnan(), "a score of +inf leaves no weight a number"
    assert (of_rows[..., ROWS:] == math.inf).all()
    seen = lse.isfinite()
    torch.testing.assert_close(of_rows[..., :ROWS][seen], lse[seen] / math.log(2))
    assert (sums == 0).all()
    assert (added == 0).all()


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
    finish_kernel[grid](
        sums, dq, None, strides(dq), HEADS, ROWS, PADDED, 0, 0.5, width, 16, part, TILE, FILLED_UP, **compile_options()
    )
    expected = (rows.view(BATCH, HEADS, PADDED, 16)[..., :ROWS, :width] * 0.5).half()
    torch.testing.assert_close(dq.cpu(), expected)


def packed_rows(device, numbers=None):
    """Room for what there is for each of packed rows of 64 columns, where they begin, and out, its gradient and dQ."""
    total = sum(LENGTHS) + BEYOND
    starts = starts_of(LENGTHS, device) if numbers is None else torch.tensor(numbers, device=device)
    padded = tiles_of(total, FILLED_UP, len(starts) - 1) * FILLED_UP
    memory = torch.full_like(Rows.memory(HEADS, padded, 64, device), math.nan)
    tensors = (torch.randn(total, HEADS, 64, device=device, dtype=torch.float16).transpose(0, 1) for _ in range(3))
    return Rows.of(memory, HEADS, padded, 64), Packed(starts, starts, True), *tensors


@pytest.mark.parametrize("with_dlse", [False, True])
def test_packed_rows_are_prepared(flash_device, with_dlse):
    rows, packed, out, dout, _ = packed_rows(flash_device)
    lse, dlse = (torch.randn(out.shape[:-1], device=flash_device) for _ in range(2))
    lse[1, 5] = -math.inf
    dout[:, sum(LENGTHS) :] = math.nan
    describe_prepare(out, dout, lse, dlse if with_dlse else None, rows, packed).of(prepare_kernel)
    delta = (out.double() * dout.double()).sum(-1) - (dlse.double() if with_dlse else 0.0)
    expected_delta = torch.zeros_like(rows.delta, dtype=torch.float64)
    expected = torch.full_like(rows.exponents, math.inf)
    for first, length, filled_up in [*slots(LENGTHS, BEYOND)][:-1]:
        own, room = slice(first, first + length), slice(filled_up, filled_up + length)
        expected_delta[:, room] = delta[:, own]
        expected[:, room] = (lse[:, own] / math.log(2)).masked_fill(lse[:, own].isinf(), math.inf)
    torch.testing.assert_close(rows.delta.double(), expected_delta, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(rows.exponents, expected)
    assert (rows.sums == 0).all()
    assert (rows.added == 0).all()


def test_packed_sums_become_gradients(flash_device):
    rows, packed, *_, dq = packed_rows(flash_device)
    padded = rows.delta.shape[-1]
    values = torch.randn(HEADS, padded, 64)
    rows.sums.copy_(torch.cat([as_added(tile) for tile in values.view(-1, TILE, 64)]))
    dq.fill_(math.nan)
    describe_finish(rows, dq, 0.5, packed).of(finish_kernel)
    for first, length, filled_up in slots(LENGTHS, BEYOND):
        expected = (values[:, filled_up : filled_up + length] * 0.5).half()
        torch.testing.assert_close(dq[:, first : first + length].cpu(), expected)


@pytest.mark.parametrize(
    "numbers",
    [[0, 200, 160], [5, -7, 2**31 - 1], [-(2**31), 2**31 - 1, -1], [0, -(2**31), -(2**31), 5], [400, 80, 0], [0, 0, 0]],
)
def test_numbers_out_of_order_read_and_write_nothing_out_of_bounds(flash_device, numbers):
    """Of a matrix that is the middle one of three in memory."""
    rows, packed, out, _, dq = packed_rows(flash_device, numbers)
    around = torch.full((3, *dq.shape[1:]), 7.0, device=flash_device, dtype=torch.float16)
    one = Rows.of(Rows.memory(1, rows.delta.shape[-1], 64, flash_device), 1, rows.delta.shape[-1], 64)
    spoilt = torch.full_like(around, math.nan)
    spoilt[1] = out[0]
    lse = torch.full(around.shape[:-1], math.nan, device=flash_device)
    lse[1] = 0.0
    describe_prepare(spoilt[1:2], spoilt[1:2], lse[1:2], None, one, packed).of(prepare_kernel)
    assert not any(x.isnan().any() for x in one)
    describe_finish(one, around[1:2], 0.5, packed).of(finish_kernel)
    assert (around[[0, 2]] == 7.0).all()
