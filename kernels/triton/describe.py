"""The launches of the attention kernels: grids, arguments and constants, from tensors and what varies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from .. import tuning
from ..launching import Launch
from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .forward import forward_kernel
from .geometry import Geometry, in_pipeline, in_units
from .inputs import Input
from .pair_gradients import pair_gradient_kernel
from .softmax import LOG2_E
from .sums import Sums
from .variation import Variation

KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel, "pairs": pair_gradient_kernel}

TOO_FEW_ROWS_FOR_WARP_GROUPS = 32
"""Of q's tile: Triton then takes Ampere's matrix instructions.

Without a pipeline k and v take turns in the same shared memory, and ptxas 12.8 derives Hopper's descriptors of the one
tile from those of the other by way of a register that it never sets (see `machine_code`).
"""


class BackwardTensors(NamedTuple):
    """What the backward's kernels read and write besides their inputs; dlse and its bound may be None."""

    out: Tensor
    dlse: Tensor | None
    lse: Tensor
    lowered_lse: Tensor
    delta: Tensor
    dlse_bound: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sums: Sums


def describe_forward(
    inputs: list[Input],
    out: Tensor,
    lse: Tensor,
    variation: Variation,
    extras: Sequence[Tensor],
    scale: float,
    arithmetic: tuning.Arithmetic,
) -> Launch:
    """The launch of `forward_kernel`; ``inputs`` are q, k and v."""
    q, k, v = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v)
    work = geometry.q_len, geometry.q_matrices
    config = tuning.lookup("forward", arithmetic, geometry.block, q.device, *work, variation.with_rules)
    in_turns = config.num_stages == 1 or not (in_pipeline(k) and in_pipeline(v))
    if in_turns and tuning.architecture_of(q.device) == "sm_90":
        warps = 4 if geometry.block <= tuning.WIDEST_TILE else config.num_warps
        config = dataclasses.replace(config, tile_q=TOO_FEW_ROWS_FOR_WARP_GROUPS, num_warps=warps)
    constants = variation.constants(geometry.q_len, geometry.k_len, backward=False)
    if constants["LEFT"] or constants["MASK"] is not None or variation.settings.packed is not None:
        # Tiles are then not visited from the first one on, or not in the order that looking ahead supposes.
        config = dataclasses.replace(config, ahead=False)
    strides, units = in_units([q, k, v, out])
    of_scores = 1.0 if variation.settings.scores else LOG2_E.value
    return Launch(
        (
            config.programs("forward", *work, variation.sequences(extras)[0]),
            geometry.slices(arithmetic, geometry.v_head_dim),
        ),
        (
            *(q, k, v, *[x.statistics for x in inputs], out, lse),
            *(variation.sinks(extras), variation.seed(extras), variation.captured(extras)),
            *(variation.blocks(extras, extras, "rows"), variation.packed(extras)),
        ),
        (
            *geometry.sizes,
            *strides,
            tuple(x.distances for x in inputs),
            *_lengths(geometry, variation),
            *variation.sequences(extras),
            abs(scale) * of_scores,
            variation.settings.kept_scale,
            variation.settings.dropout_threshold,
        ),
        geometry.constants(config, arithmetic)
        | constants
        | _to_the_end(variation)
        | {"UNITS": units, "AHEAD": config.ahead, "FLIP": scale < 0},
        config.options | {"enable_fp_fusion": arithmetic != "float32"},
    )


def describe_dq(
    inputs: list[Input],
    tensors: BackwardTensors,
    variation: Variation,
    extras: Sequence[Tensor],
    scale: float,
    arithmetic: tuning.Arithmetic,
) -> Launch:
    """The launch of `dq_kernel`; ``inputs`` are q, k, v and dout."""
    q, k, v, dout = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v)
    work = geometry.q_len, geometry.q_matrices
    config = tuning.lookup("dq", arithmetic, geometry.block, q.device, *work, variation.with_rules)
    rows = (tensors.dlse, tensors.lse, tensors.lowered_lse, tensors.delta)
    strides, units = in_units([q, k, v, tensors.out, dout, tensors.dq])
    return Launch(
        (config.programs("dq", *work, variation.sequences(extras)[0]), geometry.slices(arithmetic, geometry.head_dim)),
        (
            *_read(inputs, tensors),
            *(tensors.out, dout, *rows, tensors.dq, tensors.sums.tensors("row")),
            *(variation.seed(extras), variation.captured(extras), variation.blocks(extras, extras, "rows")),
            variation.packed(extras),
        ),
        _backward_arguments(geometry, inputs, strides, variation, variation.sequences(extras), scale),
        _backward_constants(geometry, config, variation, arithmetic)
        | {"SUMMED": variation.terms("row"), "UNITS": units}
        | _to_the_end(variation),
        config.options,
    )


def describe_dkdv(
    inputs: list[Input],
    tensors: BackwardTensors,
    variation: Variation,
    extras: Sequence[Tensor],
    scale: float,
    arithmetic: tuning.Arithmetic,
) -> Launch:
    """The launch of `dkdv_kernel`; ``inputs`` are q, k, v and dout."""
    q, k, v, dout = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v)
    work = geometry.k_len, geometry.kv_matrices
    # Where sequences are packed, registers are short here too.
    crowded = variation.with_rules or variation.settings.packed is not None
    config = tuning.lookup("dkdv", arithmetic, geometry.block, q.device, *work, crowded)
    strides, units = in_units([q, k, v, dout, tensors.dk, tensors.dv])
    return Launch(
        (
            config.programs("dkdv", *work, variation.sequences(extras)[0]),
            geometry.slices(arithmetic, geometry.head_dim, geometry.v_head_dim),
        ),
        (
            *_read(inputs, tensors),
            *(dout, tensors.lowered_lse, tensors.delta, tensors.dk, tensors.dv, tensors.sums.tensors("column")),
            *(variation.seed(extras), variation.captured(extras), variation.blocks(extras, extras, "columns")),
            variation.packed(extras),
        ),
        _backward_arguments(geometry, inputs, strides, variation, variation.sequences(extras), scale),
        _backward_constants(geometry, config, variation, arithmetic)
        | {"SUMMED": variation.terms("column"), "UNITS": units}
        | _to_the_end(variation),
        config.options,
    )


def describe_pairs(
    inputs: list[Input],
    tensors: BackwardTensors,
    term: int,
    target: Tensor,
    variation: Variation,
    extras: Sequence[Tensor],
    scale: float,
    arithmetic: tuning.Arithmetic,
) -> Launch:
    """The launch of `pair_gradient_kernel` for one term, whose gradient (batch, heads, q_len, k_len) is ``target``.

    For one that differs along distances ``target`` is (batch, heads, bands, 2, size), sums for each band.
    """
    q, k, v, dout = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v)
    config = tuning.lookup("dq", arithmetic, geometry.block, q.device, with_rules=True)
    strides, units = in_units([q, k, v, dout])
    batches, heads = target.shape[:2]
    diagonal = variation.differentiated[term].kind == "distance"
    if diagonal:
        size = target.shape[-1]
        config = dataclasses.replace(config, tile_q=size, tile_k=size)
        tiles = target.shape[2]
    else:
        tiles = triton.cdiv(tensors.sums.shape[2], config.tile_q) * triton.cdiv(tensors.sums.shape[3], config.tile_k)
    shared = tensors.sums.shape[0] // batches, geometry.heads // heads
    sequences = variation.sequences(extras)
    return Launch(
        (batches * heads * tiles, 1),
        (
            *_read(inputs, tensors),
            *(dout, tensors.lowered_lse, tensors.delta, target, variation.seed(extras), variation.captured(extras)),
            variation.packed(extras),
        ),
        (*_backward_arguments(geometry, inputs, [*strides, target.stride()[:4]], variation, sequences, scale), *shared),
        _backward_constants(geometry, config, variation, arithmetic)
        | {"TERM": term, "DIAGONAL": diagonal, "UNITS": units}
        | _to_the_end(variation),
        config.options | {"num_stages": 1},
    )


def band_size(q: Tensor, k: Tensor, v: Tensor, arithmetic: tuning.Arithmetic) -> int:
    """Rows and columns of a tile of a band, which is square."""
    config = tuning.lookup("dq", arithmetic, Geometry.of(q, k, v).block, q.device, with_rules=True)
    return min(config.tile_q, config.tile_k)


def _read(inputs: list[Input], tensors: BackwardTensors) -> tuple[Tensor | None, ...]:
    q, k, v, _ = (x.tensor for x in inputs)
    return q, k, v, *[x.statistics for x in inputs], tensors.dlse_bound


def _lengths(geometry: Geometry, variation: Variation) -> tuple[int, ...]:
    """The kernels' integer arguments from the group on."""
    left, right = variation.settings.band(geometry.q_len, geometry.k_len)
    return geometry.group, geometry.heads, geometry.q_len, geometry.k_len, left or 0, right or 0


def _to_the_end(variation: Variation) -> dict[str, bool]:
    return {"TO_THE_END": variation.settings.to_the_end}


def _backward_arguments(
    geometry: Geometry,
    inputs: list[Input],
    strides: Sequence[tuple[int, ...]],
    variation: Variation,
    sequences: tuple[int, ...],
    scale: float,
) -> tuple[object, ...]:
    return (
        *(*geometry.sizes, *strides, tuple(x.distances for x in inputs)),
        *(*_lengths(geometry, variation), *sequences, scale, scale * LOG2_E.value),
        *(variation.settings.kept_scale, variation.settings.dropout_threshold, variation.steepest),
    )


def _backward_constants(
    geometry: Geometry, config: tuning.TileConfig, variation: Variation, arithmetic: tuning.Arithmetic
) -> dict[str, Any]:
    return geometry.constants(config, arithmetic) | variation.constants(geometry.q_len, geometry.k_len, backward=True)
