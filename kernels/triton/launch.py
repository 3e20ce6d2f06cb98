"""Forward and backward of the portable kernels on tensors. Arguments are taken as already validated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tuning
from ..launching import Launcher, Plans, address_of, is_elsewhere
from ..layout import Layout, one_a_row, rows_like
from ..settings import Settings
from ..sinks import sink_gradient
from .describe import KERNELS, BackwardTensors, band_size, describe_dkdv, describe_dq, describe_forward, describe_pairs
from .geometry import arithmetic_of
from .inputs import PartsPlan, as_inputs, plan_parts
from .sums import NO_SUMS, Sums
from .variation import Variation


class ForwardPlan(NamedTuple):
    """What follows from the metadata of a forward call."""

    out: Layout
    lse: Layout
    nothing_seen: bool
    parts: PartsPlan | None
    variation: Variation
    varied: bool
    launcher: Launcher


class BackwardPlan(NamedTuple):
    """What follows from the metadata of a backward call."""

    dq: Layout
    dk: Layout
    dv: Layout
    row: Layout
    nothing_seen: bool
    parts: PartsPlan | None
    variation: Variation
    varied: bool
    dq_launcher: Launcher
    dkdv_launcher: Launcher
    pair_launchers: tuple[Launcher, ...]
    band_size: int


PLAIN = Settings().text

NOTHING_FURTHER: tuple[Any, ...] = (None, None, None, None, None)
"""In place of sinks, a seed, what rules captured, a list of blocks, and where packed sequences begin."""

_forward_plans: Plans[ForwardPlan] = Plans()
_backward_plans: Plans[BackwardPlan] = Plans()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    settings: str = PLAIN,
    numbers: Sequence[float] = (),
    extras: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Attention of q (*leading, q_len, d), k and v (*leading, k_len, d or dv): out and its natural log-sum-exp.

    The last leading axis is the heads'; that of k and v may be a divisor of q's. ``settings`` and ``numbers`` stand for
    a `Settings`, ``extras`` are the tensors that it asks for (see `Variation`). Strides are free. out is (*leading,
    q_len, dv), laid out as q is; lse is contiguous float32.
    """
    dtype, device = q.dtype, q.device
    if is_elsewhere(device):
        with torch.cuda.device(device):
            return forward(q, k, v, scale, settings, numbers, extras)
    arithmetic = arithmetic_of(q)
    shapes: tuple[object, ...] = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    if extras:
        shapes += metadata_of(extras)
    plan = _forward_plans.get(
        (shapes, dtype, device, scale, arithmetic, settings, *numbers),
        lambda: _plan_forward(q, k, v, arithmetic, Variation.of(Settings.of(settings, numbers), extras)),
    )
    out = plan.out.empty(dtype, device)
    lse = plan.lse.empty(torch.float32, device)
    variation = plan.variation
    if plan.nothing_seen:
        lse.fill_(-math.inf)
        return out.zero_(), lse.copy_(extras[0][:, None]) if variation.settings.sinks else lse
    inputs = as_inputs([q, k, v], plan.parts)
    varied = NOTHING_FURTHER
    if plan.varied:
        addresses = [extra.data_ptr() for extra in extras]
        varied = (
            *(variation.sinks(addresses), variation.seed(addresses), variation.captured(addresses)),
            *(variation.blocks(addresses, extras, "rows"), variation.packed(addresses)),
        )
    plan.launcher(
        (*inputs.addresses, *inputs.statistics, out.data_ptr(), lse.data_ptr(), *varied),
        lambda: describe_forward(inputs.describe(), out, lse, variation, extras, scale, arithmetic),
    )
    return out, lse


def metadata_of(extras: Sequence[Tensor]) -> tuple[object, ...]:
    """All that a plan depends on of further tensors."""
    return tuple([(extra.shape, extra.stride(), extra.dtype) for extra in extras])


def _plan_forward(q: Tensor, k: Tensor, v: Tensor, arithmetic: tuning.Arithmetic, variation: Variation) -> ForwardPlan:
    out = rows_like(q, v.shape[-1])
    nothing_seen = 0 in out.shape or k.shape[-2] == 0
    parts = plan_parts([q, k, v], arithmetic)
    return ForwardPlan(
        out, one_a_row(q), nothing_seen, parts, variation, variation.asks_further, Launcher(KERNELS["forward"])
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    settings: str = PLAIN,
    numbers: Sequence[float] = (),
    extras: Sequence[Tensor] = (),
    wanted: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The gradients of q, k and v, laid out as they are, from those of out and (or None) of the log-sum-exp.

    And those of the extras at the positions ``wanted``, in this order.
    """
    if is_elsewhere(q.device):
        with torch.cuda.device(q.device):
            return backward(q, k, v, out, lse, dout, dlse, scale, settings, numbers, extras, wanted)
    if dout.stride(-1) != 1:
        # Such a gradient is usually an expanded scalar; the kernels would read it element by element, many times.
        dout = dout.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dtype, device = q.dtype, q.device
    arithmetic = arithmetic_of(q)
    shapes = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), out.stride(), dout.stride())
    key = (shapes, dtype, device, scale, arithmetic, dlse is None, settings, *numbers, *metadata_of(extras), *wanted)
    plan = _backward_plans.get(
        key,
        lambda: _plan_backward(q, k, v, dout, arithmetic, Variation.of(Settings.of(settings, numbers), extras, wanted)),
    )
    variation = plan.variation
    dq, dk, dv = (layout.empty(dtype, device) for layout in (plan.dq, plan.dk, plan.dv))
    delta, lowered_lse = (plan.row.empty(torch.float32, device) for _ in range(2))
    if plan.nothing_seen:
        return dq.zero_(), dk.zero_(), dv.zero_(), _gradients_of_nothing(variation, lse, dlse, delta, extras, wanted)
    inputs = as_inputs([q, k, v, dout], plan.parts)
    bound = None if dlse is None or arithmetic == "half" else dlse.view(math.prod(k.shape[:-2]), -1).abs().amax(1)
    sums = Sums.of(variation, q, k, extras) if wanted else NO_SUMS
    tensors = BackwardTensors(out, dlse, lse, lowered_lse, delta, bound, dq, dk, dv, sums)
    varied = by_rows = by_columns = NOTHING_FURTHER[1:]
    if plan.varied:
        addresses = [extra.data_ptr() for extra in extras]
        varied = (variation.seed(addresses), variation.captured(addresses), variation.packed(addresses))
        by_rows, by_columns = (
            (*varied[:2], variation.blocks(addresses, extras, of), varied[2]) for of in ("rows", "columns")
        )
    *qkv, dout_address = inputs.addresses
    read = (*qkv, *inputs.statistics, address_of(bound))
    rows = (lowered_lse.data_ptr(), delta.data_ptr())
    of_call = (variation, extras, scale, arithmetic)
    plan.dq_launcher(
        (
            *(*read, out.data_ptr(), dout_address, address_of(dlse), lse.data_ptr(), *rows, dq.data_ptr()),
            *(sums.addresses("row"), *by_rows),
        ),
        lambda: describe_dq(inputs.describe(), tensors, *of_call),
    )
    plan.dkdv_launcher(
        (*read, dout_address, *rows, dk.data_ptr(), dv.data_ptr(), sums.addresses("column"), *by_columns),
        lambda: describe_dkdv(inputs.describe(), tensors, *of_call),
    )
    for launcher, term in zip(plan.pair_launchers, variation.gathered, strict=True):
        target = sums.target(term, extras[variation.differentiated[term].position], plan.band_size)
        launcher(
            (*read, dout_address, *rows, target.data_ptr(), *varied),
            lambda term=term, target=target: describe_pairs(inputs.describe(), tensors, term, target, *of_call),  # type: ignore[misc]
        )
    gradients = [
        sink_gradient(extras[0], lse, delta)
        if variation.settings.sinks and position == 0
        else sums.gradient(position, extras)
        for position in wanted
    ]
    return dq, dk, dv, gradients


def _gradients_of_nothing(
    variation: Variation,
    lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    extras: Sequence[Tensor],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Those of the wanted extras where no query sees a key: all zeros, but for sinks."""
    gradients = [torch.zeros_like(extras[position]) for position in wanted]
    if variation.settings.sinks and 0 in wanted:
        delta = delta.zero_() if dlse is None else torch.neg(dlse, out=delta)
        gradients[[*wanted].index(0)] = sink_gradient(extras[0], lse, delta)
    return gradients


def _plan_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    arithmetic: tuning.Arithmetic,
    variation: Variation,
) -> BackwardPlan:
    return BackwardPlan(
        rows_like(q, q.shape[-1]),
        rows_like(k, k.shape[-1]),
        rows_like(v, v.shape[-1]),
        one_a_row(q),
        any(0 in x.shape for x in (q, k, v)),
        plan_parts([q, k, v, dout], arithmetic),
        variation,
        variation.asks_further,
        Launcher(KERNELS["dq"]),
        Launcher(KERNELS["dkdv"]),
        tuple(Launcher(KERNELS["pairs"]) for _ in variation.gathered),
        band_size(q, k, v, arithmetic),
    )
