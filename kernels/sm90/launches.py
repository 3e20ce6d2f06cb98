"""What each kernel is launched with: grid, TMA descriptors, sizes and constants, from a call's tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..bound_mods import dropout_operand, itself
from ..call import Band, Call, Options
from ..launching import Launch
from ..layouts import ALIGNMENT
from ..lib.softmax import LOG2_E
from ..versions import default_ptx_options
from .backward_producer import DQ_ROW
from .lib.mma import WG_ROWS
from .lib.mods import in_gluon
from .lib.varlen import BOUND, PADDING
from .rule_arguments import bound_mods, entries_share_pairs, pair_itemsize, pair_tensor
from .tiles import (
    BackwardConfig,
    ForwardConfig,
    SplitHeadDim,
    backward_config,
    backward_head_dim,
    forward_config,
    split_head_dim,
)

ROWS = WG_ROWS.value

UNBOUNDED = 0x7FFF0000
"""Entries of an axis that is not bounds-checked."""

SECTION_BYTES = 24 << 20
"""Two tensors of the heads of a section fit into the L2 cache together if they have this many bytes."""

DTYPES = {getattr(torch, name): getattr(gl, name) for name in ("float16", "bfloat16", "float32", "uint8")}


class RowBuffers(NamedTuple):
    """The float32 buffers of a backward that have entries for each row of q, padded to ``rows``; one allocation.

    lse2: the log-sum-exp in exponents of 2, (batch_heads, rows). delta: the same shape. dq: unscaled sums in the order
    of accumulator fragments, batch_heads * rows * head_dim. turns: int32, CTAs that have added to each 64 rows of dq.
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


def num_sequences(call: Call) -> int:
    """Packed sequences of a call; 0 if none are packed."""
    starts = call.aux.cu_seqlens_q
    return 0 if starts is None else starts.numel() - 1


def row_buffers(call: Call) -> RowBuffers:
    """The per-row buffers of a call's backward."""
    rows = tiles_per_head(call.q_len, PADDING.value, num_sequences(call)) * PADDING.value
    return RowBuffers(call.q.shape[:-2].numel(), rows, backward_head_dim(call.head_dim, call.v_head_dim))


def tiles_per_head(length: int, tile: int, sequences: int = 0) -> int:
    """Tiles that hold the rows of a head; of packed sequences, enough for any lengths."""
    return length // tile + sequences + 1 if sequences else triton.cdiv(length, tile)


def forward_tiles(call: Call) -> tuple[SplitHeadDim, ForwardConfig, int]:
    """How heads are held, the configuration, and the number of tiles of a forward."""
    split = split_head_dim(call.head_dim, call.v_head_dim)
    assert split is not None
    about: Any = {"is_packed": call.is_packed, "has_rules": call.has_rules, "pair_itemsize": pair_itemsize(call)}
    config = forward_config(split, call.band, call.k_len, **about)
    per_head = tiles_per_head(call.q_len, config.consumers * ROWS, num_sequences(call))
    return split, config, call.q.shape[:-2].numel() * per_head


def with_batch(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, rows, d), of tensors that may lack the batch axis."""
    return [x if x.ndim == 4 else x.unsqueeze(0) for x in tensors]


def tma_descriptor(x: Tensor, rows: int, columns: int, *, is_packed: bool) -> TensorDescriptor:
    """The descriptor of tiles of (batch, heads, rows, d); of packed sequences as `lib.varlen` addresses them.

    What lies outside of the tensor, or of the sequence, reads as zeros and is not written.
    """
    # The stride of an axis of size 1 may be anything, and is not used.
    unused = ALIGNMENT // x.element_size()
    strides = [stride if size > 1 else unused for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    shape = list(x.shape)
    if is_packed:
        _, head, row = strides
        shape = [UNBOUNDED, UNBOUNDED, x.shape[1], BOUND.value, x.shape[3]]
        strides = [2**64 // BOUND.value - row, row, head, row]
    block = [1] * (len(shape) - 2) + [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return TensorDescriptor(x, shape, [*strides, 1], block, layout)


def float32_descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """The descriptor of unswizzled tiles of a contiguous float32 matrix."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), gl.NVMMASharedLayout(0, 32, 2))


def band_arguments(band: Band) -> tuple[int, int]:
    """Both limits; 0 for one that is None."""
    left, right = band
    return left or 0, right or 0


def heads_per_section(x: Tensor, batch_heads: int, group: int = 1) -> int:
    """How many heads share a section of `TileMap`: those whose inner tensors, like ``x`` (..., rows, d), fit into L2.

    ``group`` heads read the same ones. Fewer, if sections are of equal size then: a small last section leaves most CTAs
    idle while some compute its longest tiles.
    """
    distinct = batch_heads // group
    sections = triton.cdiv(distinct, max(1, SECTION_BYTES // (4 * x.shape[-2] * x.shape[-1])))
    sections = next((count for count in range(sections, 2 * sections + 1) if distinct % count == 0), sections)
    return group * (distinct // sections)


def score_scales(options: Options) -> tuple[float, float, float]:
    """The numbers of `lib.softmax.ScoreScale`, and ``natural`` of `lib.mods.Mods`."""
    softcap = options.softcap
    natural, inside = (options.scale, 0.0) if softcap is None else (softcap, options.scale / softcap)
    # Score changes give natural scores.
    return (LOG2_E.value if len(options.scores) > 0 else natural * LOG2_E.value), inside, natural


def backward_tiles(call: Call) -> BackwardConfig:
    """The configuration of a backward."""
    return backward_config(backward_head_dim(call.head_dim, call.v_head_dim), pair_itemsize=pair_itemsize(call))


def pair_operand(call: Call, rows: int, columns: int) -> TensorDescriptor | None:
    """The descriptor of tiles of the `pair_tensor`; None without one."""
    pairs = pair_tensor(call)
    tensor = None if pairs is None else pairs.of(call.aux)
    return None if tensor is None else tma_descriptor(tensor, rows, columns, is_packed=False)


def rule_operands(call: Call, config: ForwardConfig | BackwardConfig, lists: Tensor | None, *tile: int) -> list[Any]:
    """What a first launch takes of a call's rules: what they captured, tiles of pairs (*tile), and ``lists``."""
    captured, blocks = bound_mods(call).operands(call.aux, lists, itself)
    pairs = pair_operand(call, *tile) if config.has_pairs else None
    return [captured, pairs, blocks, dropout_operand(call.options, call.aux, itself)]


def common_constants(call: Call, config: ForwardConfig | BackwardConfig) -> dict[str, Any]:
    """What both kernels are compiled for: a call's mask and soft cap, and registers."""
    left, right = call.band
    return {
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "BOTTOM_RIGHT": call.is_packed and call.options.bottom_right,
        "SOFTCAP": call.options.softcap is not None,
        **bound_mods(call).code(backward=isinstance(config, BackwardConfig), into=in_gluon),
        "PAIR_ARGUMENT": None if (pairs := pair_tensor(call)) is None else pairs.argument,
        "BATCH_INNER": entries_share_pairs(call),
        "PRODUCER_REGISTERS": config.producer_registers,
        "CONSUMER_REGISTERS": config.consumer_registers,
    }


def forward_launch(call: Call, out: Tensor, lse: Tensor, workspace: Tensor, num_sms: int) -> Launch:
    """The launch of `forward_kernel`."""
    q, k, v, out = with_batch(call.q, call.k, call.v, out)
    (head_dim, k_tail, v_tail), config, num_tiles = forward_tiles(call)
    batch, heads = q.shape[:2]
    group, ctas, packed = heads // k.shape[1], num_sms * config.ctas, call.is_packed
    tiled = ((q, ROWS, k_tail), (k, config.tile_k, k_tail), (v, config.tile_k, v_tail), (out, ROWS, v_tail))
    constants = {
        "HEAD_DIM": head_dim, "K_TAIL": k_tail, "V_TAIL": v_tail, "TILE_K": config.tile_k,
        "CONSUMERS": config.consumers, "STAGES": config.stages, "SEPARATE_OUT": config.separate_out,
        "PERSISTENT": ctas < num_tiles, **common_constants(call, config),
    }  # fmt: skip
    return Launch(
        (min(ctas, num_tiles), 1),
        (
            *(tma_descriptor(x, rows, head_dim, is_packed=packed) for x, rows, _ in tiled),
            *(tma_descriptor(x, rows, tail, is_packed=packed) if tail else None for x, rows, tail in tiled),
            *(lse, workspace, call.aux.cu_seqlens_q, call.aux.cu_seqlens_k),
            *rule_operands(call, config, call.aux.block_rows, ROWS, config.tile_k),
            call.aux.sinks,
        ),
        (
            *(batch * heads, heads, group, call.q_len, call.k_len, *band_arguments(call.band)),
            heads_per_section(k, batch * heads, group),
            *score_scales(call.options),
            num_sequences(call),
        ),
        constants,
        {"num_warps": 4, "maxnreg": config.max_registers},
    )


def backward_launch(
    call: Call, dout: Tensor, dk: Tensor, dv: Tensor,
    buffers: RowBuffers, memory: Tensor, workspace: Tensor, num_sms: int,
) -> Launch:  # fmt: skip
    """The launch of `backward_kernel`; ``memory`` holds the buffers."""
    q, k, v, dout, dk, dv = with_batch(call.q, call.k, call.v, dout, dk, dv)
    config, packed = backward_tiles(call), call.is_packed
    head_dim, k_tail = buffers.head_dim - config.k_tail, config.k_tail
    batch, heads = k.shape[:2]
    shares_keys = config.tile_k == ROWS
    columns = config.dq_columns if shares_keys else head_dim
    num_tiles = batch * heads * tiles_per_head(call.k_len, config.tile_k, num_sequences(call))
    lse2, delta, dq, turns = buffers.views(memory)
    accumulated: tuple[object, Tensor | None] = dq, None
    if not shares_keys:
        rows = ROWS if k_tail else config.tile_q * head_dim // 2 // DQ_ROW.value
        accumulated = float32_descriptor(dq.view(-1, DQ_ROW.value), rows, DQ_ROW.value), turns
    tiled = (q, config.tile_q), (dout, config.tile_q), (k, config.tile_k), (v, ROWS)
    tails, deterministic = ((q, config.tile_q), (k, config.tile_k), (dk, ROWS)), call.options.deterministic
    constants = {
        "HEAD_DIM": head_dim, "K_TAIL": k_tail, "TILE_Q": config.tile_q, "TILE_K": config.tile_k,
        "STAGES": config.stages, "PERSISTENT": num_sms < num_tiles, "DETERMINISTIC": deterministic,
        "ROTATED": config.rotated and not deterministic and not call.depends_on_pairs, **common_constants(call, config),
    }  # fmt: skip
    return Launch(
        (min(num_sms, num_tiles), 1),
        (
            *(tma_descriptor(x, rows, head_dim, is_packed=packed) for x, rows in tiled),
            *(float32_descriptor(x, 1, config.tile_q) for x in (lse2, delta)),
            *(tma_descriptor(x, ROWS, columns, is_packed=packed) for x in (dk, dv)),
            *accumulated,
            *(tma_descriptor(x, rows, k_tail, is_packed=packed) if k_tail else None for x, rows in tails),
            *(workspace, call.aux.cu_seqlens_q, call.aux.cu_seqlens_k),
            *rule_operands(call, config, call.aux.block_columns, config.tile_q, ROWS),
        ),
        (
            *(batch * heads, heads, q.shape[1] // heads, call.q_len, call.k_len, buffers.rows),
            *(*band_arguments(call.band), heads_per_section(q, batch * heads), call.options.scale),
            *score_scales(call.options),
            num_sequences(call),
        ),
        constants,
        # With Triton 3.9 the kernel for 256 columns is 1 % faster at Triton's own level of register allocation.
        {"num_warps": 4, "maxnreg": config.max_registers, **(default_ptx_options() if shares_keys else {})},
    )


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
    tensors = buffers.views(memory)[2], dq, call.aux.cu_seqlens_q
    constants = {"HEAD_DIM": call.head_dim, "DQ_COLUMNS": backward_tiles(call).dq_columns}
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
    sizes = {"PADDED_HEAD_DIM": buffers.head_dim, "ROWS": ROWS, "PADDING": PADDING.value}
    numbers = (*strides, q.shape[1], call.q_len, buffers.rows, num_sequences(call), *more)
    return Launch((buffers.batch_heads * buffers.rows // ROWS, 1), tensors, numbers, sizes | constants, {})
