"""Kernels for what SwiGLU does with single elements, forward and backward: each reads and writes every element once.

gu (rows, 2 d_ff) has the gate g and the value u side by side, as one product makes them: h = silu(g) u. Its gradient
has the same form, so that what follows from it is one product too. The backward kernel computes h again, which the
gradient of the next weight needs, so that nothing but gu has to be kept.

All is computed in float32, whatever the tensors are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, Launcher, is_elsewhere

TILE = 1024
"""Elements of a program's tile."""
WARPS = 4
"""Which have 8 elements a thread, 16 bytes of the narrow dtypes."""


@triton.jit
def tile_of(rows, d_ff, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's rows, its columns of g, and which pairs of them there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < rows) & (column < d_ff)


@triton.jit
def swiglu_forward_kernel(gu, h, rows, d_ff, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """h (rows, d_ff) of gu (rows, 2 d_ff)."""
    row, column, inside = tile_of(rows, d_ff, ROWS, COLUMNS)
    gates = gu + row * (2 * d_ff) + column
    g = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gates + d_ff, mask=inside, other=0.0).to(tl.float32)
    out = g * tl.sigmoid(g) * u
    tl.store(h + row * d_ff + column, out.to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(dh, gu, dgu, h, rows, d_ff, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """dgu (rows, 2 d_ff) of dh (rows, d_ff) and gu, and h."""
    row, column, inside = tile_of(rows, d_ff, ROWS, COLUMNS)
    one, pair = row * d_ff + column, row * (2 * d_ff) + column
    g = tl.load(gu + pair, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gu + pair + d_ff, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dh + one, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    slope = sigmoid * (1.0 + g * (1.0 - sigmoid))
    dtype = h.dtype.element_ty
    tl.store(dgu + pair, (dout * u * slope).to(dtype), mask=inside)
    tl.store(dgu + pair + d_ff, (dout * silu).to(dtype), mask=inside)
    tl.store(h + one, (silu * u).to(dtype), mask=inside)


def forward(gu: Tensor) -> Tensor:
    """h = silu(g) u of gu (rows, 2 d_ff), its halves being g and u: (rows, d_ff), in gu's dtype."""
    gu = gu.contiguous()
    h = gu.new_empty(gu.shape[0], gu.shape[1] // 2)
    _launch(swiglu_forward_kernel, gu, h)
    return h


def backward(dh: Tensor, gu: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gu (rows, 2 d_ff) from that of h (rows, d_ff), and h again, in gu's dtype."""
    gu = gu.contiguous()
    h, dgu = gu.new_empty(gu.shape[0], gu.shape[1] // 2), torch.empty_like(gu)
    _launch(swiglu_backward_kernel, dh.contiguous(), gu, dgu, h)
    return dgu, h


def describe(*tensors: Tensor) -> Launch:
    """The launch of a kernel, whose last tensor is h."""
    rows, d_ff = tensors[-1].shape
    columns = min(TILE, triton.next_power_of_2(d_ff))
    tile = {"ROWS": TILE // columns, "COLUMNS": columns}
    # The first axis of a grid is the one that may be long.
    grid = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(d_ff, columns)
    return Launch(grid, tensors, (rows, d_ff), tile, {"num_warps": WARPS})


_launchers: dict[tuple[object, ...], Launcher] = {}


def _launch(kernel: triton.JITFunction, *tensors: Tensor) -> None:
    h = tensors[-1]
    if is_elsewhere(h.device):
        with torch.cuda.device(h.device):
            _launch(kernel, *tensors)
    elif h.numel():
        key = (kernel.__name__, h.shape, h.dtype, h.device)
        launcher = _launchers.get(key)
        if launcher is None:
            launcher = _launchers[key] = Launcher(kernel)
        launcher(tuple([tensor.data_ptr() for tensor in tensors]), describe, *tensors)
