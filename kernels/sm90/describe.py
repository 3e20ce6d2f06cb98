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
from ..triton.softmax import LOG2_E
from ..settings import Window
from ..versions import default_ptx_options
from .backward_copying import NUMBERS_A_ROW
from .config import BACKWARD, columns_of, forward_config, width_of
from .coverage import ALIGNMENT
from .packing import BOUND, FILLED_UP
from .tiles import GROUP

ROWS = GROUP.value
ROWS_FILLED_UP = FILLED_UP.value

MOST = 0x7FFF0000
"""Entries of an axis that has no end."""

SECTION_BYTES = 24 << 20
"""Keys and values of so many matrices stay in the L2 cache while their queries pass."""

DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


class Packed(NamedTuple):
    """Where packed sequences of q and of k begin, and whether their last rows' own columns are the last.

    Or that each matrix is one sequence.
    """

    q_starts: Tensor | None = None
    k_starts: Tensor | None = None
    to_the_end: bool = False

    @property
    def sequences(self) -> int:
        """How many; 0 if none are packed."""
        return 0 if self.q_starts is None else self.q_starts.numel() - 1

    @property
    def starts(self) -> tuple[Tensor | None, Tensor | None]:
        """As kernels take them."""
        return self.q_starts, self.k_starts


ALONE = Packed()


class Rows(NamedTuple):
    """What the backward has for each row of q: two numbers (matrices, padded), and sums (..., padded, width), float32.

    ``padded`` is the number of rows, filled up to tiles. And how many have added to the sums of every 64 rows, int32.
    """

    exponents: Tensor
    delta: Tensor
    sums: Tensor
    added: Tensor

    @staticmethod
    def memory(matrices: int, padded: int, width: int, device: torch.device) -> Tensor:
        """Room for all four, in one allocation."""
        count = matrices * padded
        return torch.empty(count * (2 + width) + count // ROWS, dtype=torch.float32, device=device)

    @staticmethod
    def addresses(address: int, matrices: int, padded: int, width: int) -> tuple[int, int, int, int]:
        """Where they lie in such memory."""
        size = 4 * matrices * padded
        return address, address + size, address + 2 * size, address + (2 + width) * size

    @staticmethod
    def of(memory: Tensor, matrices: int, padded: int, width: int) -> Rows:
        """They themselves."""
        count = matrices * padded
        numbers = memory[: 2 * count].view(2, matrices, padded)
        added = memory[(2 + width) * count :].view(torch.int32)
        return Rows(numbers[0], numbers[1], memory[2 * count : (2 + width) * count], added)


def as_heads(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, rows, d), of tensors that may have no batch axis."""
    return [x if x.ndim == 4 else x.unsqueeze(0) for x in tensors]


def descriptor(x: Tensor, rows: int, columns: int, packed: Packed = ALONE) -> TensorDescriptor:
    """What the copying unit is told of a tensor (batch, heads, rows, d), to copy tiles of so many rows and columns.

    What lies outside of the tensor reads as zeros, and is not written; of packed sequences, outside of one (`packing`).
    """
    # Of an axis of one entry the stride may be anything, and is used for nothing.
    any_stride = ALIGNMENT // x.element_size()
    strides = [stride if size > 1 else any_stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    shape = list(x.shape)
    if packed.sequences:
        _, head, row = strides
        shape = [MOST, MOST, x.shape[1], BOUND.value, x.shape[3]]
        strides = [2**64 // BOUND.value - row, row, head, row]
    block = [1] * (len(shape) - 2) + [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, shape, [*strides, 1], block, layout)


def tiles_of(length: int, tile: int, sequences: int) -> int:
    """How many tiles hold the rows of a matrix; if these are packed sequences, how many are enough for any lengths."""
    return length // tile + sequences + 1 if sequences else triton.cdiv(length, tile)


def of_rows(x: Tensor, rows: int) -> TensorDescriptor:
    """The same for numbers (matrices, padded), a tile being those of some rows."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows], gl.NVMMASharedLayout(0, 32, 2))


def _of_sums(sums: Tensor, count: int) -> TensorDescriptor:
    """The same for the sums of dQ, a tile being so many of them in the order in which they are added."""
    width = NUMBERS_A_ROW.value
    layout = gl.NVMMASharedLayout(0, 32, 2)
    return TensorDescriptor(sums, [sums.numel() // width, width], [width, 1], [count // width, width], layout)


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
    return softcap * LOG2_E.value, scale / softcap


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
    packed: Packed = ALONE,
) -> Launch:
    """The launch of `forward_kernel` on tensors ([batch,] heads, rows, d), for a GPU of so many multiprocessors.

    ``counter`` is an int32 that is 0, and 0 again after it.
    """
    q, k, v, out = as_heads(q, k, v, out)
    batch, heads, q_len, head_dim = q.shape
    columns = columns_of(head_dim, v.shape[-1])
    assert columns is not None
    width, *mores = columns
    config = forward_config(columns, band, k.shape[2], is_packed=packed.sequences > 0)
    group = heads // k.shape[1]
    tiles = batch * heads * tiles_of(q_len, config.groups * ROWS, packed.sequences)
    programs = processors * config.programs
    more = {"KEY_MORE": mores[0], "VALUE_MORE": mores[1]}
    described = (q, ROWS), (k, config.tile_k), (v, config.tile_k), (out, ROWS)
    of_keys, of_values = (more_columns or width for more_columns in mores)
    beyond = (of_keys, of_keys, of_values, of_values) if any(mores) else ()
    return Launch(
        (min(programs, tiles), 1),
        (
            *(descriptor(x, rows, width, packed) for x, rows in described),
            *(descriptor(x, rows, columns, packed) for (x, rows), columns in zip(described, beyond, strict=False)),
            *(lse, counter, *packed.starts),
        ),
        (
            *(batch * heads, heads, group, q_len, k.shape[2], *band_arguments(band)),
            *(section(k, batch * heads, group), *exponents(scale, softcap), packed.sequences),
        ),
        {
            "HEAD_DIM": width,
            "TILE_K": config.tile_k,
            "STAGES": config.stages,
            **band_constants(band),
            "GROUPS": config.groups,
            **(more if any(mores) else {"OWN_ROOM": config.own_room}),
            "CAPPED": softcap is not None,
            "TO_THE_END": packed.to_the_end,
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
    counter: Tensor,
    band: Window,
    scale: float,
    softcap: float | None,
    processors: int,
    packed: Packed = ALONE,
    deterministic: bool = False,
) -> Launch:
    """The launch of the width's kernel on tensors ([batch,] heads, rows, d), for a GPU of so many multiprocessors.

    ``gradients`` are those of k and v. ``counter`` is an int32 that is 0, and 0 again after it.
    """
    q, k, v, dout = as_heads(q, k, v, dout)
    width = width_of(q.shape[-1])
    config = BACKWARD[width]
    batch, heads, k_len, _ = k.shape
    group = q.shape[1] // heads
    lengths = batch * heads, heads, group, q.shape[2], k_len, rows.delta.shape[-1]
    is_shared = config.keys == ROWS
    columns = config.part if is_shared else width
    tiles = batch * heads * tiles_of(k_len, config.keys, packed.sequences)
    return Launch(
        (min(processors, tiles), 1),
        (
            *(descriptor(x, config.tile_q, width, packed) for x in (q, dout)),
            *(descriptor(k, config.keys, width, packed), descriptor(v, ROWS, width, packed)),
            *(of_rows(rows.exponents, config.tile_q), of_rows(rows.delta, config.tile_q)),
            *(descriptor(x, ROWS, columns, packed) for x in as_heads(*gradients)),
            rows.sums if is_shared else _of_sums(rows.sums, width * config.tile_q // 2),
            *(() if is_shared else (rows.added,)),
            *(counter, *packed.starts),
        ),
        (
            *(*lengths, *band_arguments(band), section(q, batch * heads), scale, *exponents(scale, softcap)),
            packed.sequences,
        ),
        {
            "HEAD_DIM": width,
            **({} if is_shared else {"IN_ORDER": deterministic, "TURNED": config.turned}),
            "TILE_Q": config.tile_q,
            "STAGES": config.stages,
            **band_constants(band),
            "CAPPED": softcap is not None,
            "TO_THE_END": packed.to_the_end,
            "PERSISTENT": processors < tiles,
            "COPY_REGISTERS": config.copy_registers,
            "REGISTERS": config.registers,
        },
        # With Triton 3.9 the kernel for 256 columns is 1 % faster at Triton's own level of register allocation.
        {"num_warps": 4, "maxnreg": config.most_registers, **(default_ptx_options() if is_shared else {})},
    )


def describe_prepare(
    out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, rows: Rows, packed: Packed = ALONE
) -> Launch:
    """The launch of `prepare_kernel` on out and its gradient ([batch,] heads, rows, d), and numbers for their rows."""
    out, dout = as_heads(out, dout)
    _, heads, q_len, head_dim = out.shape
    strides = out.stride()[:3], dout.stride()[:3]
    widths = {"HEAD_DIM": head_dim, "WIDTH": rows.sums.numel() // rows.delta.numel()} | _HEIGHTS
    tensors = out, dout, lse, dlse, *rows, packed.q_starts
    return Launch(_tiles(rows), tensors, (*strides, heads, *_lengths(q_len, rows, packed)), widths, {})


def describe_finish(rows: Rows, dq: Tensor, scale: float, packed: Packed = ALONE) -> Launch:
    """The launch of `finish_kernel` on the gradient of q ([batch,] heads, rows, d)."""
    [dq] = as_heads(dq)
    _, heads, q_len, head_dim = dq.shape
    width = width_of(head_dim)
    widths = {"HEAD_DIM": head_dim, "WIDTH": width, "PART": BACKWARD[width].part} | _HEIGHTS
    tensors = rows.sums, dq, packed.q_starts
    return Launch(_tiles(rows), tensors, (dq.stride()[:3], heads, *_lengths(q_len, rows, packed), scale), widths, {})


_HEIGHTS = {"ROWS": ROWS, "FILLED_UP": FILLED_UP.value}


def _lengths(q_len: int, rows: Rows, packed: Packed) -> tuple[int, int, int]:
    return q_len, rows.delta.shape[-1], packed.sequences


def _tiles(rows: Rows) -> tuple[int, int]:
    return rows.delta.numel() // ROWS, 1
