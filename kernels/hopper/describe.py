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
from ..settings import Window
from .config import BACKWARD, columns_of, forward_config, width_of
from .coverage import ALIGNMENT
from .tiles import GROUP

ROWS = GROUP.value
ROWS_FILLED_UP = 2 * ROWS
"""What the backward has for each row of q is for a multiple of so many: of any tile."""

SECTION_BYTES = 24 << 20
"""Keys and values of so many matrices stay in the L2 cache while their queries pass."""

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class Rows(NamedTuple):
    """What the backward has for each row of q: two numbers (matrices, padded), and sums (..., padded, width), float32.

    ``padded`` is the number of rows, filled up to tiles.
    """

    exponents: Tensor
    delta: Tensor
    sums: Tensor

    @staticmethod
    def memory(matrices: int, padded: int, width: int, device: torch.device) -> Tensor:
        """Room for all three, in one allocation."""
        return torch.empty(matrices * padded * (2 + width), dtype=torch.float32, device=device)

    @staticmethod
    def addresses(address: int, matrices: int, padded: int, width: int) -> tuple[int, int, int]:
        """Where they lie in such memory."""
        size = 4 * matrices * padded
        return address, address + size, address + 2 * size

    @staticmethod
    def of(memory: Tensor, matrices: int, padded: int, width: int) -> Rows:
        """They themselves."""
        count = matrices * padded
        numbers = memory[: 2 * count].view(2, matrices, padded)
        return Rows(numbers[0], numbers[1], memory[2 * count :])


def as_heads(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, rows, d), of tensors that may have no batch axis."""
    return [x if x.ndim == 4 else x.unsqueeze(0) for x in tensors]


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copying unit is told of a tensor (batch, heads, rows, d), to copy tiles of so many rows and columns.

    What lies outside of the tensor reads as zeros, and is not written.
    """
    block = [1, 1, rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    # Of an axis of one entry the stride may be anything, and is used for nothing.
    any_stride = ALIGNMENT // x.element_size()
    strides = [stride if size > 1 else any_stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def of_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """The same for numbers (matrices, padded), a tile being those of some rows."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def band_arguments(band: Window) -> tuple[int, int]:
    """Both limits as integers: query i sees the keys from i + left to i + right."""
    left, right = band
    return left or 0, right or 0


def band_constants(band: Window) -> dict[str, bool]:
    """Which limits there are."""
    left, right = band
    return {"LEFT": left is not None, "RIGHT": right is not None}


def section(x: Tensor, matrices: int, group: int = 1) -> int:
    """How many of so many matrices are taken together: those whose keys and values, or q and dout, the L2 cache holds.

    ``x`` (..., rows, d) is one of the two; ``group`` matrices read the same of them. Fewer, if sections are alike then:
    a last one of few matrices leaves most programs idle, while some compute its longest tiles.
    """
    different = matrices // group
    count = triton.cdiv(different, max(1, SECTION_BYTES // (4 * x.shape[-2] * x.shape[-1])))
    count = next((number for number in range(count, 2 * count + 1) if different % number == 0), count)
    return group * (different // count)


def exponents(scale: float, softcap: float | None) -> tuple[float, float]:
    """Numbers of the kernels' `Exponents`."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return softcap * LOG2_E.value, 2.0 * LOG2_E.value * scale / softcap


def describe_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    counter: Tensor,
    band: Window,
    scale: float,
    softcap: float | None,
    processors: int,
) -> Launch:
    """The launch of `forward_kernel` on tensors ([batch,] heads, rows, d), for a GPU of so many multiprocessors.

    ``counter`` is an int32 that is 0, and 0 again after it.
    """
    q, k, v, out = as_heads(q, k, v, out)
    batch, heads, q_len, head_dim = q.shape
    columns = columns_of(head_dim, v.shape[-1])
    assert columns is not None
    width, *mores = columns
    config = forward_config(columns, band, k.shape[2])
    group = heads // k.shape[1]
    tiles = batch * heads * triton.cdiv(q_len, config.groups * ROWS)
    programs = processors * config.programs
    more = {"KEY_MORE": mores[0], "VALUE_MORE": mores[1]}
    key_more, value_more = (more_columns or width for more_columns in mores)
    return Launch(
        (min(programs, tiles), 1),
        (
            *(descriptor(q, ROWS, width), descriptor(k, config.tile_k, width), descriptor(v, config.tile_k, width)),
            descriptor(out, ROWS, width),
            *(
                (
                    *(descriptor(q, ROWS, key_more), descriptor(k, config.tile_k, key_more)),
                    *(descriptor(v, config.tile_k, value_more), descriptor(out, ROWS, value_more)),
                )
                if any(mores)
                else ()
            ),
            *(lse, counter),
        ),
        (
            *(batch * heads, heads, group, q_len, k.shape[2], *band_arguments(band)),
            *(section(k, batch * heads, group), *exponents(scale, softcap)),
        ),
        {
            "HEAD_DIM": width,
            "TILE_K": config.tile_k,
            "STAGES": config.stages,
            **band_constants(band),
            "GROUPS": config.groups,
            **(more if any(mores) else {"OWN_ROOM": config.own_room}),
            "CAPPED": softcap is not None,
            "PERSISTENT": programs < tiles,
            "COPY_REGISTERS": config.copy_registers,
            "REGISTERS": config.registers,
        },
        {"num_warps": 4, "maxnreg": config.most_registers},
    )


def describe_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    rows: Rows,
    gradients: Sequence[Tensor],
    band: Window,
    scale: float,
    softcap: float | None,
) -> Launch:
    """The launch of the width's kernel on tensors ([batch,] heads, rows, d); ``gradients`` are those of k and v."""
    q, k, v, dout = as_heads(q, k, v, dout)
    width = width_of(q.shape[-1])
    config = BACKWARD[width]
    batch, heads, k_len, _ = k.shape
    group = q.shape[1] // heads
    lengths = batch * heads, heads, group, q.shape[2], k_len, rows.delta.shape[-1]
    columns = width if config.keys == 2 * ROWS else config.part
    return Launch(
        (batch * heads * triton.cdiv(k_len, config.keys), 1),
        (
            *(descriptor(x, config.tile_q, width) for x in (q, dout)),
            *(descriptor(k, config.keys, width), descriptor(v, ROWS, width)),
            *(of_rows(rows.exponents, config.tile_q), of_rows(rows.delta, config.tile_q)),
            *(descriptor(x, ROWS, columns) for x in as_heads(*gradients)),
            rows.sums,
        ),
        (*lengths, *band_arguments(band), section(q, batch * heads), scale, *exponents(scale, softcap)),
        {
            "HEAD_DIM": width,
            "TILE_Q": config.tile_q,
            "STAGES": config.stages,
            **band_constants(band),
            "CAPPED": softcap is not None,
            "COPY_REGISTERS": config.copy_registers,
            "REGISTERS": config.registers,
        },
        {"num_warps": 4, "maxnreg": config.most_registers},
    )


def describe_prepare(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, rows: Rows) -> Launch:
    """The launch of `prepare_kernel` on out and its gradient ([batch,] heads, rows, d), and numbers for their rows."""
    out, dout = as_heads(out, dout)
    _, heads, q_len, head_dim = out.shape
    strides = out.stride()[:3], dout.stride()[:3]
    widths = {"HEAD_DIM": head_dim, "WIDTH": rows.sums.numel() // rows.delta.numel(), "ROWS": ROWS}
    return Launch(
        _tiles(rows), (out, dout, lse, dlse, *rows), (*strides, heads, q_len, rows.delta.shape[-1]), widths, {}
    )


def describe_finish(rows: Rows, dq: Tensor, scale: float) -> Launch:
    """The launch of `finish_kernel` on the gradient of q ([batch,] heads, rows, d)."""
    [dq] = as_heads(dq)
    _, heads, q_len, head_dim = dq.shape
    width = width_of(head_dim)
    widths = {"HEAD_DIM": head_dim, "WIDTH": width, "PART": BACKWARD[width].part, "ROWS": ROWS}
    return Launch(
        _tiles(rows), (rows.sums, dq), (dq.stride()[:3], heads, q_len, rows.delta.shape[-1], scale), widths, {}
    )


def _tiles(rows: Rows) -> tuple[int, int]:
    return rows.delta.numel() // ROWS, 1
