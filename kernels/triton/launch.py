"""The launches of the attention kernels: grids, arguments and constants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ..bound_mods import Read, itself, packed_operand
from ..call import Aux
from ..launching import Launch
from ..lib.softmax import LOG2_E
from . import tiles
from .halves import Input
from .problem import Problem, is_pipelined, stride_multiples
from .tiles import WIDEST_TILE, TileConfig, lookup

AMPERE_ROWS = 32
"""Rows of q's tile with which Triton takes Ampere's matrix instructions.

Without a pipeline k and v share one buffer in shared memory, and ptxas 12.8 derives Hopper's descriptors of one tile
from those of the other through a register that is never written (`machine_code`).
"""


class RowTensors(NamedTuple):
    """What the backward's kernels read and write for each row, in contiguous float32.

    dlse: gradient of the log-sum-exp or None. dlse_bound: the largest finite |dlse| of each group, None without dlse or
    for 16-bit inputs; without values the largest |dlse| + |dout|, of all inputs. lowered_lse, delta: stored by
    `dq_kernel` for the other passes.
    """

    dlse: Tensor | None
    dlse_bound: Tensor | None
    lse: Tensor
    lowered_lse: Tensor
    delta: Tensor


def forward_operands(problem: Problem, aux: Aux, read: Read) -> tuple[Any, ...]:
    """The operands of `forward_kernel` after lse."""
    sinks = None if aux.sinks is None else read(aux.sinks)
    return sinks, *backward_operands(problem, aux, aux.block_rows, read)


def backward_operands(problem: Problem, aux: Aux, lists: Tensor | None, read: Read) -> tuple[Any, ...]:
    """The operands of `dq_kernel` and `dkdv_kernel` after their sums; ``lists``: of the blocks that they visit."""
    seed = None if aux.seed is None else read(aux.seed)
    return seed, *problem.mods.operands(aux, lists, read), packed_operand(aux, read)


def forward_launch(problem: Problem, inputs: list[Input], out: Tensor, lse: Tensor, aux: Aux) -> Launch:
    """The launch of `forward_kernel`; ``inputs`` are q, k and v."""
    q, k, v = (x.tensor for x in inputs)
    options, constants = problem.options, problem.mods.code(backward=False)
    config = forward_config(problem, k, v)
    if problem.left is not None or constants["MASK"] is not None or problem.is_packed:
        # Tiles are then not visited from the first one on, which computing scores ahead relies on.
        config = dataclasses.replace(config, ahead=False)
    strides, multiples = stride_multiples([q, k, v, out])
    programs = config.programs("forward", problem.q_len, problem.q_batch_heads, problem.packed[0])
    return Launch(
        (programs, problem.slices(problem.v_head_dim)),
        (q, k, v, *[x.stats for x in inputs], out, lse, *forward_operands(problem, aux, itself)),
        (
            *(*problem.sizes, *strides, tuple(x.lo_offset for x in inputs), *problem.lengths),
            abs(options.scale) * (1.0 if problem.mods.scores else LOG2_E.value),
            *(options.keep_scale, options.dropout_threshold),
        ),
        {"C": problem.constants(config), **constants, "BOTTOM_RIGHT": options.bottom_right}
        | {"STRIDE_MULTIPLES": multiples, "AHEAD": config.ahead, "FLIP": options.scale < 0},
        config.options | {"enable_fp_fusion": problem.precision != "float32"},
    )


def forward_config(problem: Problem, k: Tensor, v: Tensor) -> TileConfig:
    """The forward's configuration, with fewer rows where ptxas would miscompile Hopper's instructions."""
    work = problem.q_len, problem.q_batch_heads
    config = lookup("forward", problem.precision, problem.block, problem.device, *work, problem.with_mods)
    shares_buffer = config.num_stages == 1 or not (is_pipelined(k) and is_pipelined(v))
    if shares_buffer and tiles.architecture_of(problem.device) == "sm_90":
        warps = 4 if problem.block <= WIDEST_TILE else config.num_warps
        config = dataclasses.replace(config, tile_q=AMPERE_ROWS, num_warps=warps)
    return config


def dq_launch(
    problem: Problem, inputs: list[Input], rows: RowTensors, out: Tensor, dq: Tensor | None, sums: Sequence[Tensor],
    aux: Aux,
) -> Launch:  # fmt: skip
    """The launch of `dq_kernel`; ``inputs`` are q, k, v and dout. Without dq it computes ``sums`` alone."""
    work = problem.q_len, problem.q_batch_heads
    config = lookup("dq", problem.precision, problem.block, problem.device, *work, problem.with_mods)
    dout = inputs[3].tensor
    return _backward_launch(
        problem, inputs, rows, config,
        grid=(config.programs("dq", *work, problem.packed[0]), problem.slices(problem.head_dim)),
        operands=(
            *(out, dout, rows.dlse, rows.lse, rows.lowered_lse, rows.delta, dq, tuple(sums)),
            *backward_operands(problem, aux, aux.block_rows, itself),
        ),
        strided=[out, dout, out if dq is None else dq],
        constants={"TERMS": problem.mods.computed_by("row")},
    )  # fmt: skip


def dkdv_launch(
    problem: Problem, inputs: list[Input], rows: RowTensors, dk: Tensor | None, dv: Tensor | None,
    sums: Sequence[Tensor], aux: Aux,
) -> Launch:  # fmt: skip
    """The launch of `dkdv_kernel`; ``inputs`` are q, k, v and dout. Without dk and dv it computes ``sums`` alone."""
    work = problem.k_len, problem.kv_batch_heads
    if dk is None:  # without accumulators it is like the pass of dQ, transposed
        config = lookup("dq", problem.precision, problem.block, problem.device, with_mods=True)
        config = dataclasses.replace(config, tile_q=config.tile_k, tile_k=config.tile_q)
    else:
        # With packed sequences registers are short here too.
        with_mods = problem.with_mods or problem.is_packed
        config = lookup("dkdv", problem.precision, problem.block, problem.device, *work, with_mods)
    dout = inputs[3].tensor
    slices = problem.slices(problem.head_dim, problem.v_head_dim)
    return _backward_launch(
        problem, inputs, rows, config,
        grid=(config.programs("dkdv", *work, problem.packed[0]), slices),
        operands=(
            *(dout, rows.lowered_lse, rows.delta, dk, dv, tuple(sums)),
            *backward_operands(problem, aux, aux.block_columns, itself),
        ),
        strided=[dout, *(dout if x is None else x for x in (dk, dv))],
        constants={"TERMS": problem.mods.computed_by("column")},
    )  # fmt: skip


def pair_launch(problem: Problem, inputs: list[Input], rows: RowTensors, term: int, target: Tensor, aux: Aux) -> Launch:
    """The launch of `pair_gradient_kernel` for one term, into its buffer (`mod_gradients.empty_buffer`)."""
    config = lookup("dq", problem.precision, problem.block, problem.device, with_mods=True)
    batches, heads = target.shape[:2]
    diagonal = problem.mods.terms[term].computed_by == "distance"
    if diagonal:
        config = dataclasses.replace(config, tile_q=target.shape[-1], tile_k=target.shape[-1])
        tiles = target.shape[2]
    else:
        tiles = triton.cdiv(problem.shape[2], config.tile_q) * triton.cdiv(problem.shape[3], config.tile_k)
    dout = inputs[3].tensor
    seed, captured, _, cu_seqlens = backward_operands(problem, aux, None, itself)
    return _backward_launch(
        problem, inputs, rows, dataclasses.replace(config, num_stages=1),
        grid=(batches * heads * tiles, 1),
        operands=(dout, rows.lowered_lse, rows.delta, target, seed, captured, cu_seqlens),
        strided=[dout],
        more_strides=(tuple(target.stride()[:4]),),
        more_arguments=(problem.shape[0] // batches, problem.heads // heads),
        constants={"TERM": term, "DIAGONAL": diagonal},
    )  # fmt: skip


def band_size(problem: Problem) -> int:
    """The rows and columns of a band's square tiles in `pair_gradient_kernel`."""
    config = lookup("dq", problem.precision, problem.block, problem.device, with_mods=True)
    return min(config.tile_q, config.tile_k)


def _backward_launch(
    problem: Problem,
    inputs: list[Input],
    rows: RowTensors,
    config: TileConfig,
    grid: tuple[int, int],
    operands: tuple[Any, ...],
    strided: list[Tensor],
    constants: dict[str, Any],
    more_strides: tuple[tuple[int, ...], ...] = (),
    more_arguments: tuple[int, ...] = (),
) -> Launch:
    """A launch of a backward kernel: what all have in common, and what differs.

    Args:
        operands: after ``dlse_bound``.
        strided: tensors whose strides follow v's.
        more_strides: strides after those.
        more_arguments: numbers after ``max_slope``.
    """
    options = problem.options
    qkv = [x.tensor for x in inputs[:3]]
    strides, multiples = stride_multiples([*qkv, *strided])
    return Launch(
        grid,
        (*qkv, *[x.stats for x in inputs], rows.dlse_bound, *operands),
        (
            *(*problem.sizes, *strides, *more_strides, tuple(x.lo_offset for x in inputs), *problem.lengths),
            *(options.scale, options.scale * LOG2_E.value, options.keep_scale, options.dropout_threshold),
            *(problem.mods.max_slope(options.keep_scale), *more_arguments),
        ),
        {"C": problem.constants(config), **problem.mods.code(backward=True), **constants}
        | {"BOTTOM_RIGHT": options.bottom_right, "STRIDE_MULTIPLES": multiples},
        config.options,
    )
