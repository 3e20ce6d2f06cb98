"""Forward and backward of the portable kernels on tensors. Arguments are taken as already validated."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tuning
from ..launching import Launch, Launcher, Plans, address_of, on_device
from ..layout import Layout, one_a_row, rows_like
from .backward import dkdv_kernel, dq_kernel
from .forward import forward_kernel
from .geometry import Geometry, arithmetic_of, in_pipeline, in_units
from .inputs import Input, PartsPlan, as_inputs, plan_parts
from .softmax import LOG2_E


class ForwardPlan(NamedTuple):
    """What follows from the metadata of a forward call."""

    out: Layout
    lse: Layout
    nothing_seen: bool
    parts: PartsPlan | None
    launcher: Launcher


class BackwardPlan(NamedTuple):
    """What follows from the metadata of a backward call."""

    dq: Layout
    dk: Layout
    dv: Layout
    row: Layout
    nothing_seen: bool
    parts: PartsPlan | None
    dq_launcher: Launcher
    dkdv_launcher: Launcher


TOO_FEW_ROWS_FOR_WARP_GROUPS = 32
"""Of q's tile: Triton then takes Ampere's matrix instructions.

Without a pipeline k and v take turns in the same shared memory, and ptxas 12.8 derives Hopper's descriptors of the one
tile from those of the other by way of a register that it never sets (see `machine_code`).
"""

_forward_plans: Plans[ForwardPlan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def forward(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q (*leading, q_len, d), k and v (*leading, k_len, d or dv): out and its natural log-sum-exp.

    The last leading axis is the heads'; that of k and v may be a divisor of q's. ``causal`` is "none", "top_left" or
    "bottom_right". Strides are free. out is (*leading, q_len, dv), laid out as q is; lse is contiguous float32.
    """
    dtype, device = q.dtype, q.device
    arithmetic = arithmetic_of(q)
    shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    plan = _forward_plans.get(
        (shapes, dtype, device, causal, scale, arithmetic), lambda: _plan_forward(q, k, v, arithmetic)
    )
    out = plan.out.empty(dtype, device)
    lse = plan.lse.empty(torch.float32, device)
    if plan.nothing_seen:
        return out.zero_(), lse.fill_(-math.inf)
    with on_device(device):
        inputs = as_inputs([q, k, v], plan.parts)
        plan.launcher(
            (*inputs.addresses, *inputs.statistics, out.data_ptr(), lse.data_ptr()),
            lambda: describe_forward(inputs.describe(), out, lse, causal, scale, arithmetic),
        )
    return out, lse


def _plan_forward(q: Tensor, k: Tensor, v: Tensor, arithmetic: tuning.Arithmetic) -> ForwardPlan:
    out = rows_like(q, v.shape[-1])
    nothing_seen = 0 in out.shape or k.shape[-2] == 0
    return ForwardPlan(out, one_a_row(q), nothing_seen, plan_parts([q, k, v], arithmetic), Launcher(forward_kernel))


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    causal: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, laid out as they are, from those of out and (or None) of the log-sum-exp."""
    if dout.stride(-1) != 1:
        # Such a gradient is usually an expanded scalar; the kernels would read it element by element, many times.
        dout = dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dtype, device = q.dtype, q.device
    arithmetic = arithmetic_of(q)
    shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), dout.stride())
    key = (shapes, dtype, device, causal, scale, arithmetic, dlse is None)
    plan = _backward_plans.get(key, lambda: _plan_backward(q, k, v, dout, arithmetic))
    dq, dk, dv = (layout.empty(dtype, device) for layout in (plan.dq, plan.dk, plan.dv))
    if plan.nothing_seen:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = plan.row.empty(torch.float32, device)
    with on_device(device):
        inputs = as_inputs([q, k, v, dout], plan.parts)
        bound = None if dlse is None or arithmetic == "half" else dlse.view(math.prod(k.shape[:-2]), -1).abs().amax(1)
        tensors = BackwardTensors(out, dlse, lse, delta, bound, dq, dk, dv)
        *qkv, dout_address = inputs.addresses
        read = (*qkv, *inputs.statistics, address_of(bound))
        rows = (address_of(dlse), lse.data_ptr(), delta.data_ptr())
        plan.dq_launcher(
            (*read, out.data_ptr(), dout_address, *rows, dq.data_ptr()),
            lambda: describe_dq(inputs.describe(), tensors, causal, scale, arithmetic),
        )
        plan.dkdv_launcher(
            (*read, dout_address, *rows[1:], dk.data_ptr(), dv.data_ptr()),
            lambda: describe_dkdv(inputs.describe(), tensors, causal, scale, arithmetic),
        )
    return dq, dk, dv


def _plan_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, arithmetic: tuning.Arithmetic) -> BackwardPlan:
    return BackwardPlan(
        rows_like(q, q.shape[-1]),
        rows_like(k, k.shape[-1]),
        rows_like(v, v.shape[-1]),
        one_a_row(q),
        any(0 in x.shape for x in (q, k, v)),
        plan_parts([q, k, v, dout], arithmetic),
        Launcher(dq_kernel),
        Launcher(dkdv_kernel),
    )


class BackwardTensors(NamedTuple):
    """What the backward's kernels read and write besides their inputs; dlse and its bound may be None."""

    out: Tensor
    dlse: Tensor | None
    lse: Tensor
    delta: Tensor
    dlse_bound: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor


def describe_forward(
    inputs: list[Input], out: Tensor, lse: Tensor, causal: str, scale: float, arithmetic: tuning.Arithmetic
) -> Launch:
    """The launch of `forward_kernel`; ``inputs`` are q, k and v."""
    q, k, v = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v, causal)
    work = geometry.q_len, geometry.q_matrices
    config = tuning.lookup("forward", arithmetic, geometry.block, q.device, *work)
    in_turns = config.num_stages == 1 or not (in_pipeline(k) and in_pipeline(v))
    if in_turns and tuning.architecture_of(q.device) == "sm_90":
        config = dataclasses.replace(config, tile_q=TOO_FEW_ROWS_FOR_WARP_GROUPS, num_warps=4)
    strides, units = in_units([q, k, v, out])
    constants = geometry.constants(config) | {"UNITS": units, "AHEAD": config.ahead, "FLIP": scale < 0}
    return Launch(
        (config.programs("forward", *work), 1),
        (q, k, v, *[x.statistics for x in inputs], out, lse),
        (
            *geometry.sizes,
            *strides,
            tuple(x.distances for x in inputs),
            *geometry.scalars,
            abs(scale) * LOG2_E.value,
        ),
        constants,
        config.options | {"enable_fp_fusion": arithmetic != "float32"},
    )


def describe_dq(
    inputs: list[Input], tensors: BackwardTensors, causal: str, scale: float, arithmetic: tuning.Arithmetic
) -> Launch:
    """The launch of `dq_kernel`; ``inputs`` are q, k, v and dout."""
    q, k, v, dout = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v, causal)
    work = geometry.q_len, geometry.q_matrices
    config = tuning.lookup("dq", arithmetic, geometry.block, q.device, *work)
    read = (q, k, v, *[x.statistics for x in inputs], tensors.dlse_bound)
    rows = (tensors.dlse, tensors.lse, tensors.delta)
    strides, units = in_units([q, k, v, tensors.out, dout, tensors.dq])
    return Launch(
        (config.programs("dq", *work), 1),
        (*read, tensors.out, dout, *rows, tensors.dq),
        _backward_arguments(geometry, inputs, strides, scale),
        geometry.constants(config) | {"UNITS": units},
        config.options,
    )


def describe_dkdv(
    inputs: list[Input], tensors: BackwardTensors, causal: str, scale: float, arithmetic: tuning.Arithmetic
) -> Launch:
    """The launch of `dkdv_kernel`; ``inputs`` are q, k, v and dout."""
    q, k, v, dout = (x.tensor for x in inputs)
    geometry = Geometry.of(q, k, v, causal)
    work = geometry.k_len, geometry.kv_matrices
    config = tuning.lookup("dkdv", arithmetic, geometry.block, q.device, *work)
    read = (q, k, v, *[x.statistics for x in inputs], tensors.dlse_bound)
    strides, units = in_units([q, k, v, dout, tensors.dk, tensors.dv])
    return Launch(
        (config.programs("dkdv", *work), 1),
        (*read, dout, tensors.lse, tensors.delta, tensors.dk, tensors.dv),
        _backward_arguments(geometry, inputs, strides, scale),
        geometry.constants(config) | {"UNITS": units},
        config.options,
    )


def _backward_arguments(
    geometry: Geometry, inputs: list[Input], strides: list[tuple[int, ...]], scale: float
) -> tuple[object, ...]:
    distances = tuple(x.distances for x in inputs)
    return *geometry.sizes, *strides, distances, *geometry.scalars, scale, scale * LOG2_E.value
