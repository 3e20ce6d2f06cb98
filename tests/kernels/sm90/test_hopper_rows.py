"""The kernels before and after the backward for Hopper: lse2, delta and zeros for each row; dQ from its sums."""

from __future__ import annotations

import math

import pytest
import torch

from cs336_systems.kernels.call import NO_AUX, Aux, Call, Options
from cs336_systems.kernels.sm90.backward_rows import finish_kernel, prepare_kernel
from cs336_systems.kernels.sm90.launches import backward_tiles
from cs336_systems.kernels.sm90.row_launches import RowBuffers, finish_launch, prepare_launch, row_buffers
from cs336_systems.testing import starts_of

HEADS, TILE, PADDING = 3, 64, 128
LENGTHS, AFTER = [3, 0, 128, 200, 1, 61], 70
"""Packed sequences, and rows after the last."""


def slots(lengths, after):
    """The first row of each sequence, its length, and its first row in padded buffers; the rows after the last too."""
    first = 0
    for number, length in enumerate([*lengths, after]):
        yield first, length, (first // PADDING + number) * PADDING
        first += length


def call_of(device, *, d, dv=None, is_packed, starts=None):
    """(2, 3, 100, d or dv), rows before heads in memory, or (3, 463, d or dv) packed; with poisoned buffers."""
    shape = (sum(LENGTHS) + AFTER, HEADS, d) if is_packed else (2, 100, HEADS, d)
    q, out, dout = (
        torch.randn(*shape[:-1], columns, device=device, dtype=torch.float16).transpose(-3, -2)
        for columns in (d, dv or d, dv or d)
    )
    aux = NO_AUX
    if is_packed:
        starts = starts_of(LENGTHS, device) if starts is None else torch.tensor(starts, device=device)
        aux = Aux(cu_seqlens_q=starts, cu_seqlens_k=starts)
    call = Call(q, q, out, Options(0.5), aux)
    buffers = row_buffers(call)
    return call, out, dout, buffers, torch.full((buffers.elements,), math.nan, device=device)


def copied_rows(is_packed):
    """Pairs of rows in tensors, and of the same rows in padded buffers."""
    spans = [*slots(LENGTHS, AFTER)] if is_packed else [(0, 100, 0)]
    return [(slice(first, first + length), slice(start, start + length)) for first, length, start in spans]


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize(
    ("d", "dv", "is_packed"),
    [*((d, d, False) for d in (64, 40, 96, 160, 400)), (192, 128, False), (136, 72, True), (64, 64, True)],
)
def test_prepare(flash_device, d, dv, is_packed, with_dlse):
    call, out, dout, buffers, memory = call_of(flash_device, d=d, dv=dv, is_packed=is_packed)
    lse, dlse = (torch.randn(out.shape[:-1], device=flash_device) for _ in range(2))
    lse[..., 1, 5], lse[..., 2, 7] = -math.inf, math.inf
    if is_packed:
        dout[:, sum(LENGTHS) :] = math.nan
    prepare_launch(call, out, dout, lse, dlse if with_dlse else None, buffers, memory).of(prepare_kernel)
    lse2, delta, dq, turns = buffers.views(memory)
    row_deltas = (out.double() * dout.double()).sum(-1) - (dlse.double() if with_dlse else 0.0)
    expected_delta = torch.zeros_like(delta, dtype=torch.float64).view(*out.shape[:-2], buffers.rows)
    expected = torch.full_like(lse2, math.inf).view(expected_delta.shape)
    row_lse2 = torch.where(lse == -math.inf, math.inf, torch.where(lse == math.inf, math.nan, lse / math.log(2)))
    for rows, padded in copied_rows(is_packed)[: len(LENGTHS)]:
        expected_delta[..., padded], expected[..., padded] = row_deltas[..., rows], row_lse2[..., rows]
    torch.testing.assert_close(delta.double(), expected_delta.view(delta.shape), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse2, expected.view(lse2.shape), equal_nan=True)
    assert dq.isnan().all() if backward_tiles(call).has_turns else (dq == 0).all()
    assert (turns == 0).all()


def fragments(tile):
    """A tile (64, columns) in the order of accumulator fragments: registers of 4, then threads."""
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(tile.shape[1]), indexing="ij")
    thread = rows // 16 * 32 + rows % 8 * 4 + columns % 8 // 2
    register = rows % 16 // 8 * 2 + columns % 2
    order = torch.empty(tile.numel(), dtype=tile.dtype)
    order[columns // 8 * 512 + thread * 4 + register] = tile
    return order


@pytest.mark.parametrize(
    ("d", "dv", "is_packed"),
    [*((d, d, False) for d in (64, 40, 96, 160, 400, 256)), (192, 128, False), (136, 72, True), (64, 64, True)],
)
def test_finish(flash_device, d, dv, is_packed):
    call, _, _, buffers, memory = call_of(flash_device, d=d, dv=dv, is_packed=is_packed)
    dq = torch.empty_like(call.q)
    sums = torch.randn(buffers.batch_heads, buffers.rows, buffers.head_dim)
    columns = backward_tiles(call).dq_columns
    tiles = [half for tile in sums.view(-1, TILE, buffers.head_dim) for half in tile.split(columns, 1)]
    _, _, dq_sums, turns = buffers.views(memory)
    dq_sums.copy_(torch.cat([fragments(tile) for tile in tiles]))
    turns.copy_(torch.arange(len(turns)) % 3)
    dq.fill_(math.nan)
    finish_launch(call, dq, buffers, memory).of(finish_kernel)
    if backward_tiles(call).has_turns:
        # Of 64 or 128 rows that nobody visited there are no sums.
        span = backward_tiles(call).tile_q // TILE
        visited = (turns.view(-1, span)[:, 0] > 0).cpu()
        sums.view(len(visited), -1)[~visited] = 0.0
    by_head = sums.view(*dq.shape[:-2], buffers.rows, -1)[..., :d] * 0.5
    for rows, padded in copied_rows(is_packed):
        torch.testing.assert_close(dq[..., rows, :].cpu(), by_head[..., padded, :].half())


@pytest.mark.parametrize(
    "starts",
    [[0, 200, 160], [5, -7, 2**31 - 1], [-(2**31), 2**31 - 1, -1], [0, -(2**31), -(2**31), 5], [400, 80, 0], [0, 0, 0]],
)
def test_cu_seqlens_out_of_order_read_and_write_nothing_out_of_bounds(flash_device, starts):
    """Of a head that is the middle one of three in memory."""
    call, out, *_ = call_of(flash_device, d=64, is_packed=True, starts=starts)
    around = torch.full(out.shape, 7.0, device=flash_device, dtype=torch.float16)
    spoilt = torch.full_like(around, math.nan)
    lse = torch.full(around.shape[:-1], math.nan, device=flash_device)
    spoilt[1], lse[1] = out[0], 0.0
    middle = Call(*[spoilt[1:2]] * 3, call.options, call.aux)
    buffers = row_buffers(middle)
    memory = torch.full((buffers.elements,), math.nan, device=flash_device)
    prepare_launch(middle, spoilt[1:2], spoilt[1:2], lse[1:2], None, buffers, memory).of(prepare_kernel)
    lse2, delta, dq, turns = buffers.views(memory)
    assert not lse2.isnan().any()
    assert not delta.isnan().any()
    assert dq.isnan().all()
    assert (turns == 0).all()
    finish_launch(middle, around[1:2], buffers, memory).of(finish_kernel)
    assert (around[[0, 2]] == 7.0).all()


def test_buffers_lie_where_their_addresses_are():
    buffers = RowBuffers(3, 128, 64)
    memory = torch.empty(buffers.elements)
    views = buffers.views(memory)
    assert buffers.addresses(memory.data_ptr()) == tuple(x.data_ptr() for x in views)
    assert sum(x.numel() for x in views) == memory.numel()
