"""The pointwise kernels of SwiGLU, forward and backward: each reads and writes every element once.

A row of gu (rows, 2 d_ff) is the gate g, then the value u, as one matrix product computes them: h = silu(g) u. The
gradient dgu has the same layout. The backward kernel recomputes h, for the gradient of the next weight, so that only gu
is saved. Arithmetic is in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import Launch, Launcher, is_elsewhere

BLOCK = 1024
"""Elements per program."""
NUM_WARPS = 4
"""With 8 elements per thread: 16 bytes of the 16-bit dtypes."""


@triton.jit
def block_indices(rows, d_ff, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A program's rows and columns, and the mask of those in bounds."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    return row, col, (row < rows) & (col < d_ff)


@triton.jit
def swiglu_forward_kernel(gu, h, rows, d_ff, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Write h (rows, d_ff)."""
    row, col, mask = block_indices(rows, d_ff, BLOCK_ROWS, BLOCK_COLS)
    gate = gu + row * (2 * d_ff) + col
    g = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate + d_ff, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + row * d_ff + col, (g * tl.sigmoid(g) * u).to(h.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dh, gu, dgu, h, rows, d_ff, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Write dgu (rows, 2 d_ff), and h (rows, d_ff) again."""
    row, col, mask = block_indices(rows, d_ff, BLOCK_ROWS, BLOCK_COLS)
    offset_h, offset_g = row * d_ff + col, row * (2 * d_ff) + col
    g = tl.load(gu + offset_g, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gu + offset_g + d_ff, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dh + offset_h, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    dsilu = sigmoid * (1.0 + g * (1.0 - sigmoid))
    dtype = h.dtype.element_ty
    tl.store(dgu + offset_g, (grad * u * dsilu).to(dtype), mask=mask)
    tl.store(dgu + offset_g + d_ff, (grad * silu).to(dtype), mask=mask)
    tl.store(h + offset_h, (silu * u).to(dtype), mask=mask)


def forward(gu: Tensor) -> Tensor:
    """h (rows, d_ff), in gu's dtype, from gu (rows, 2 d_ff)."""
    gu = gu.contiguous()
    h = gu.new_empty(gu.shape[0], gu.shape[1] // 2)
    _launch(swiglu_forward_kernel, gu, h)
    return h


def backward(dh: Tensor, gu: Tensor) -> tuple[Tensor, Tensor]:
    """dgu (rows, 2 d_ff) and h (rows, d_ff), in gu's dtype, from dh (rows, d_ff) and gu."""
    gu = gu.contiguous()
    h, dgu = gu.new_empty(gu.shape[0], gu.shape[1] // 2), torch.empty_like(gu)
    _launch(swiglu_backward_kernel, dh.contiguous(), gu, dgu, h)
    return dgu, h


def launch_arguments(*tensors: Tensor) -> Launch:
    """The launch of a kernel, whose last tensor is h."""
    rows, d_ff = tensors[-1].shape
    cols = min(BLOCK, triton.next_power_of_2(d_ff))
    block = {"BLOCK_ROWS": BLOCK // cols, "BLOCK_COLS": cols}
    # Only a grid's first axis may exceed 65,535.
    grid = triton.cdiv(rows, block["BLOCK_ROWS"]), triton.cdiv(d_ff, cols)
    return Launch(grid, tensors, (rows, d_ff), block, {"num_warps": NUM_WARPS})


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
        launcher(tuple([tensor.data_ptr() for tensor in tensors]), launch_arguments, *tensors)
