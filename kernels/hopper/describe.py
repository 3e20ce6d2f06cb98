"""From tensors to the launches of the kernels for Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launching import Launch
from ..portable.softmax import LOG2_E
from .config import BACKWARD, FORWARD
from .tiles import GROUP

ROWS = GROUP.value
KEYS = 2 * ROWS
"""Keys of a tile of the backward."""

SECTION_BYTES = 24 << 20
"""Keys and values of so many matrices stay in the L2 cache while their queries pass."""

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class Band(NamedTuple):
    """Query i sees the keys from i + left to i + right; None where there is no such limit."""

    left: int | None
    right: int | None

    @property
    def arguments(self) -> tuple[int, int]:
        """Both as integers."""
        return self.left or 0, self.right or 0

    @property
    def constants(self) -> dict[str, bool]:
        """Which limits there are."""
        return {"LEFT": self.left is not None, "RIGHT": self.right is not None}


class Rows(NamedTuple):
    """What the backward has for each row of q: two numbers (matrices, padded), and sums (..., padded, d), float32."""

    exponents: Tensor
    delta: Tensor
    sums: Tensor


def descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """What the copying unit is told of a tensor, to copy tiles of this shape."""
    layout = gl.NVMMASharedLayout.get_default_for([*block], DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [*block], layout)


def of_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """The same for numbers (matrices, padded), a tile being those of some rows."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def section(k: Tensor) -> int:
    """How many matrices of k, and as many of v, the L2 cache holds."""
    return max(1, SECTION_BYTES // (4 * k.shape[-2] * k.shape[-1]))


def describe_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counter: Tensor, band: Band, scale: float, programs: int
) -> Launch:
    """The launch of `forward_kernel` on tensors (batch, heads, rows, d), with at most so many programs.

    ``counter`` is an int32 that is 0, and 0 again after it.
    """
    config = FORWARD[q.shape[-1]]
    batch, heads, q_len, head_dim = q.shape
    group = heads // k.shape[1]
    tiles = batch * heads * triton.cdiv(q_len, config.groups * ROWS)
    tile = (1, 1, config.tile_k, head_dim)
    return Launch(
        (min(programs, tiles), 1),
        (descriptor(q, 1, 1, ROWS, head_dim), descriptor(k, *tile), descriptor(v, *tile), out, lse, counter),
        (
            *(out.stride()[:3], batch * heads, heads, group, q_len, k.shape[2], *band.arguments),
            *(group * section(k), scale * LOG2_E.value),
        ),
        {
            "HEAD_DIM": head_dim,
            "TILE_K": config.tile_k,
            "GROUPS": config.groups,
            "STAGES": config.stages,
            "OWN_ROOM": config.own_room,
            "PERSISTENT": programs < tiles,
            **band.constants,
            "COPY_REGISTERS": config.copy_registers,
            "REGISTERS": config.registers,
        },
        {"num_warps": 4, "maxnreg": config.most_registers},
    )


def describe_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rows: Rows, gradients: Sequence[Tensor], band: Band, scale: float
) -> Launch:
    """The launch of `backward_kernel` on tensors (batch, heads, rows, d); ``gradients`` are those of k and v."""
    head_dim = q.shape[-1]
    config = BACKWARD[head_dim]
    dk, dv = gradients
    batch, heads, k_len, _ = k.shape
    group = q.shape[1] // heads
    tile, keys = (1, 1, config.tile_q, head_dim), (1, 1, KEYS, head_dim)
    sums = rows.sums.view(-1, head_dim)
    lengths = batch * heads, heads, group, q.shape[2], k_len, rows.delta.shape[-1]
    return Launch(
        (batch * heads * triton.cdiv(k_len, KEYS), 1),
        (
            *(descriptor(q, *tile), descriptor(dout, *tile), descriptor(k, *keys), descriptor(v, *keys)),
            *(of_rows(rows.exponents, config.tile_q), of_rows(rows.delta, config.tile_q)),
            *(descriptor(sums, config.tile_q, head_dim // 2), dk, dv),
        ),
        (dk.stride()[:3], dv.stride()[:3], *lengths, *band.arguments, section(q), scale, scale * LOG2_E.value),
        {
            "HEAD_DIM": head_dim,
            "TILE_Q": config.tile_q,
            "STAGES": config.stages,
            "DQ_STAGES": config.dq_stages,
            **band.constants,
            "COPY_REGISTERS": config.copy_registers,
            "REGISTERS": config.registers,
        },
        {"num_warps": 4, "maxnreg": config.most_registers},
    )
