"""The backward's per-row buffers, and launches of the kernels that fill them before it and read them after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..call import Call
from ..launching import Launch
from .launches import ROWS, backward_tiles, num_sequences, tiles_per_head, with_batch
from .lib.varlen import PADDING
from .tiles import backward_head_dim


class RowBuffers(NamedTuple):
    """The float32 buffers of a backward that have entries for each row of q, padded to ``rows``; one allocation.

    lse2: the log-sum-exp in exponents of 2, (batch_heads, rows). delta: the same shape. dq: unscaled sums in the order
    of accumulator fragments, batch_heads * rows * head_dim. turns: int32 for each 64 rows of dq, see `dq_reducer`.
    """

    batch_heads: int
    rows: int
    head_dim: int

    @property
    def elements(self) -> int:
        """Of the allocation."""
        count = self.batch_heads * self.rows
        return count * (2 + self.head_dim) + count // ROWS

    def views(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """lse2, delta, dq and turns."""
        count = self.batch_heads * self.rows
        lse2, delta = memory[: 2 * count].view(2, self.batch_heads, self.rows)
        end = (2 + self.head_dim) * count
        return lse2, delta, memory[2 * count : end], memory[end:].view(torch.int32)

    def addresses(self, address: int) -> tuple[int, int, int, int]:
        """Those of the views."""
        size = 4 * self.batch_heads * self.rows
        return address, address + size, address + 2 * size, address + (2 + self.head_dim) * size


def row_buffers(call: Call) -> RowBuffers:
    """The per-row buffers of a call's backward."""
    rows = tiles_per_head(call.q_len, PADDING.value, num_sequences(call)) * PADDING.value
    return RowBuffers(call.q.shape[:-2].numel(), rows, backward_head_dim(call.head_dim, call.v_head_dim))


def prepare_launch(
    call: Call, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, buffers: RowBuffers, memory: Tensor
) -> Launch:
    """The launch of `prepare_kernel`."""
    out, dout = with_batch(out, dout)
    tensors = out, dout, lse, dlse, *buffers.views(memory), call.aux.cu_seqlens_q
    strides = out.stride()[:3], dout.stride()[:3]
    return _row_launch(call, buffers, tensors, strides, (), {"HEAD_DIM": call.v_head_dim})


def finish_launch(call: Call, dq: Tensor, buffers: RowBuffers, memory: Tensor) -> Launch:
    """The launch of `finish_kernel`."""
    [dq] = with_batch(dq)
    config = backward_tiles(call)
    tensors = *buffers.views(memory)[2:], dq, call.aux.cu_seqlens_q
    constants = {"HEAD_DIM": call.head_dim, "DQ_COLUMNS": config.dq_columns, "DQ_TILE": config.tile_q}
    return _row_launch(call, buffers, tensors, (dq.stride()[:3],), (call.options.scale,), constants)


def _row_launch(
    call: Call,
    buffers: RowBuffers,
    tensors: tuple[Tensor | None, ...],
    strides: tuple[tuple[int, ...], ...],
    more: tuple[float, ...],
    constants: dict[str, int],
) -> Launch:
    """A program for each 64 rows of the buffers."""
    [q] = with_batch(call.q)
    has_turns = backward_tiles(call).has_turns
    sizes = {"PADDED_HEAD_DIM": buffers.head_dim, "ROWS": ROWS, "PADDING": PADDING.value, "HAS_TURNS": has_turns}
    numbers = (*strides, q.shape[1], call.q_len, buffers.rows, num_sequences(call), *more)
    return Launch((buffers.batch_heads * buffers.rows // ROWS, 1), tensors, numbers, sizes | constants, {})
