"""What each kernel is launched with: grid, TMA descriptors, sizes and constants, from a call's tensors."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..bound_mods import dropout_operand, itself
from ..call import BLOCK, Band, Call, Options
from ..launching import Launch
from ..layouts import ALIGNMENT
from ..lib.softmax import LOG2_E
from ..mods import code_of
from ..versions import default_ptx_options
from .dq_reducer import DQ_ROW
from .lib.mma import WG_ROWS
from .lib.mods import in_gluon
from .lib.varlen import BOUND
from .rule_arguments import bound_mods, entries_share_pairs, loads_pairs, pair_itemsize, pair_tensor
from .tiles import (
    BACKWARD_OF_V,
    BackwardConfig,
    ForwardConfig,
    SplitHeadDim,
    backward_config,
    forward_config,
    split_head_dim,
)

if TYPE_CHECKING:
    from .row_launches import RowBuffers

ROWS = WG_ROWS.value

UNBOUNDED = 0x7FFF0000
"""Entries of an axis that is not bounds-checked."""

SECTION_BYTES = 24 << 20
"""Two tensors of the heads of a section fit into the L2 cache together if they have this many bytes."""

DTYPES = {getattr(torch, name): getattr(gl, name) for name in ("float16", "bfloat16", "float32", "uint8")}


def num_sequences(call: Call) -> int:
    """Packed sequences of a call; 0 if none are packed."""
    starts = call.aux.cu_seqlens_q
    return 0 if starts is None else starts.numel() - 1


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


def optional_descriptor(x: Tensor | None, rows: int, columns: int, *, is_packed: bool) -> TensorDescriptor | None:
    """The same; None without a tensor, or for no columns."""
    return None if x is None or columns == 0 else tma_descriptor(x, rows, columns, is_packed=is_packed)


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


def backward_tiles(call: Call, *, of_v: bool = False) -> BackwardConfig:
    """The configuration of a backward, or with ``of_v`` of the launch that computes dV alone."""
    if of_v:
        return BACKWARD_OF_V
    is_curved = any(code_of(name).is_curved for name, _ in call.options.score_rules)
    return backward_config(call.head_dim, call.v_head_dim, pair_itemsize=pair_itemsize(call), is_curved=is_curved)


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


def is_divisible(call: Call, config: ForwardConfig | BackwardConfig) -> bool:
    """Whether all rows of the tiles or listed blocks that a CTA loops over exist: rules then need no clamps.

    In a backward whose rules load a number for each pair they are clamped all the same: else LLVM keeps addresses from
    step to step, in registers that there are not. Of tables of distances it has few.
    """
    if not call.has_rules or call.is_packed:
        return False
    if isinstance(config, BackwardConfig):
        if loads_pairs(call, by_tma=config.has_pairs):
            return False
        length, tile = call.q_len, config.tile_q
    else:
        length, tile = call.k_len, config.tile_k
    return length > 0 and length % tile == length % BLOCK == 0


def common_constants(call: Call, config: ForwardConfig | BackwardConfig) -> dict[str, Any]:
    """What both kernels are compiled for: a call's mask and soft cap, and registers."""
    left, right = call.band
    divisible = is_divisible(call, config)
    into = functools.partial(in_gluon, whole_tiles=divisible)
    return {
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "BOTTOM_RIGHT": call.is_packed and call.options.bottom_right,
        "SOFTCAP": call.options.softcap is not None,
        **bound_mods(call).code(backward=isinstance(config, BackwardConfig), into=into),
        "PAIR_ARGUMENT": None if (pairs := pair_tensor(call)) is None else pairs.argument,
        "BATCH_INNER": entries_share_pairs(call),
        "INNER_DIVISIBLE": divisible,
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
            *(optional_descriptor(x, rows, tail, is_packed=packed) for x, rows, tail in tiled),
            *(lse, workspace, call.aux.cu_seqlens_q, call.aux.cu_seqlens_k),
            *rule_operands(call, config, call.aux.block_rows, ROWS, config.tile_k),
            call.aux.sinks,
        ),
        (
            *(batch * heads, heads, group, call.q_len, call.k_len, *band_arguments(call.band)),
            heads_per_section(k, batch * heads, group),
            *score_scales(call.options),
            *(num_sequences(call), *call.options.max_seqlens),
        ),
        constants,
        {"num_warps": 4, "maxnreg": config.max_registers},
    )


def backward_launch(
    call: Call, dout: Tensor, dk: Tensor | None, dv: Tensor | None,
    buffers: RowBuffers, memory: Tensor, workspace: Tensor, num_sms: int,
) -> Launch:  # fmt: skip
    """The launch of `backward_kernel`; ``memory`` holds the buffers. Above 256 columns one of dk and dv is None."""
    q, k, v, dout = with_batch(call.q, call.k, call.v, dout)
    of_v, packed = dk is None, call.is_packed
    config = backward_tiles(call, of_v=of_v)
    head_dim, k_tail, v_tail = buffers.head_dim - config.k_tail, config.k_tail, config.v_tail
    batch, heads = k.shape[:2]
    shares_keys = config.tile_k == ROWS
    columns = head_dim // 2 if shares_keys else head_dim
    q_columns, dout_columns = (config.piece if config.piece and x else head_dim for x in (of_v, not of_v))
    num_tiles = batch * heads * tiles_per_head(call.k_len, config.tile_k, num_sequences(call))
    lse2, delta, dq, turns = buffers.views(memory)
    accumulated: tuple[object, Tensor | None] = dq, None
    if not shares_keys:
        rows = ROWS if k_tail else config.tile_q * head_dim // 2 // DQ_ROW.value
        accumulated = float32_descriptor(dq.view(-1, DQ_ROW.value), rows, DQ_ROW.value), turns
    tiled = (
        *((q, config.tile_q, q_columns), (dout, config.tile_q, dout_columns)),
        *((k, config.tile_k, head_dim), (v, ROWS, head_dim)),
    )
    dk, dv = (None if x is None else with_batch(x)[0] for x in (dk, dv))
    of_dk, of_dv = (tail // 2 if shares_keys else tail for tail in (k_tail, v_tail))
    tails = (
        *((q, config.tile_q, k_tail), (k, config.tile_k, k_tail), (dk, ROWS, of_dk)),
        *((dout, config.tile_q, v_tail), (v, ROWS, v_tail), (dv, ROWS, of_dv)),
    )
    constants = {
        "HEAD_DIM": head_dim, "K_TAIL": k_tail, "V_TAIL": v_tail, "TILE_Q": config.tile_q, "TILE_K": config.tile_k,
        "STAGES": config.stages, "PAIR_STAGES": config.pair_stages,
        "PIECES": triton.cdiv((q if of_v else v).shape[-1], config.piece) if config.piece else 0,
        "PERSISTENT": num_sms < num_tiles, "DETERMINISTIC": call.options.deterministic,
        **common_constants(call, config),
    }  # fmt: skip
    return Launch(
        (min(num_sms, num_tiles), 1),
        (
            *(tma_descriptor(x, rows, width, is_packed=packed) for x, rows, width in tiled),
            *(float32_descriptor(x, 1, config.tile_q) for x in (lse2, delta)),
            *(optional_descriptor(x, ROWS, columns, is_packed=packed) for x in (dk, dv)),
            *accumulated,
            *(optional_descriptor(x, rows, tail, is_packed=packed) for x, rows, tail in tails),
            *(workspace, call.aux.cu_seqlens_q, call.aux.cu_seqlens_k),
            *rule_operands(call, config, call.aux.block_columns, config.tile_q, ROWS),
        ),
        (
            *(batch * heads, heads, q.shape[1] // heads, call.q_len, call.k_len, buffers.rows),
            *(*band_arguments(call.band), heads_per_section(q, batch * heads), call.options.scale),
            *score_scales(call.options),
            *(num_sequences(call), *call.options.max_seqlens),
        ),
        constants,
        # With Triton 3.9 the kernel for 256 columns is 1 % faster at Triton's own level of register allocation.
        {"num_warps": 4, "maxnreg": config.max_registers, **(default_ptx_options() if head_dim == 256 else {})},
    )
