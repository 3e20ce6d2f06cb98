"""The operators ``cs336_systems::statistics_forward`` and ``statistics_backward``: see `statistics`.

Eager calls take them too: autograd, torch.compile, torch.export and dispatch modes see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...kernels.call import Aux, AuxLayout, Call, Gradients, Wanted, plan_caches
from ...kernels.layouts import one_a_row, rows_like
from .. import dispatch
from ..derivatives import TWICE
from ..op import (
    AUX,
    NAMESPACE,
    NUM_AUX,
    NUM_OPTIONS,
    OPTIONS,
    aux_arguments,
    aux_of,
    call_of,
    laid_out_like,
    library,
    option_arguments,
    unflatten,
    wanted_tensors,
)
from ..plan import remember
from . import tiled

FORWARD = f"(Tensor q, Tensor k, {AUX}, {OPTIONS}, str backend) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    "(Tensor q, Tensor k, Tensor lse, Tensor entropy, Tensor? dlse, Tensor? dentropy, "
    f"{AUX}, {OPTIONS}, str backend, bool want_sinks, bool[] want_score_aux) -> (Tensor, Tensor, Tensor[])"
)
"""The backward also returns the gradients wanted, that of the sinks first."""

KernelStatistics = Callable[[Tensor, Tensor, Aux], tuple[Tensor, Tensor, Tensor]]

_plans: dict[Hashable, KernelStatistics] = {}
_backward_plans: dict[Hashable, Callable[..., Gradients]] = {}
plan_caches += _plans, _backward_plans


def statistics(call: Call, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp, the largest score and the entropy of each row, by "triton" or "tiled"."""
    arguments = *aux_arguments(call.aux), *option_arguments(call.options)
    lse, max_scores, entropy = torch.ops.cs336_systems.statistics_forward(call.q, call.k, *arguments, backend)
    return lse, max_scores, entropy


def _forward(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *others, backend = arguments
    call = call_of(q, k, k, others)
    if backend == "tiled":
        return tiled.forward(q, k, call.options, call.aux)
    key = call.key
    plan = _plans.get(key)
    if plan is None:
        plan = remember(_plans, key, dispatch.PORTABLE.module.plan_statistics(call))
    with torch.cuda.device_of(q):  # where Triton launches
        return plan(q, k, call.aux)


def _backward(
    q: Tensor, k: Tensor, lse: Tensor, entropy: Tensor, dlse: Tensor | None, dentropy: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    *others, backend, want_sinks, want_score_aux = arguments
    wanted = Wanted(want_sinks, tuple(want_score_aux))
    call = call_of(q, k, k, others)
    if backend != "tiled" and q.dtype != torch.float32:
        return _by_kernels(call, lse, entropy, dlse, dentropy, wanted)
    if backend != "tiled":
        # Of scores in the millions, rounded otherwise, the probabilities exp(score - lse) would be wrong.
        lse, _, entropy = tiled.forward(q, k, call.options, call.aux)
    gradients = tiled.backward(q, k, lse, entropy, dlse, dentropy, call.options, call.aux, wanted)
    return gradients.q, gradients.k, [x for x in (gradients.sinks, *gradients.score_aux) if x is not None]


def _by_kernels(
    call: Call, lse: Tensor, entropy: Tensor, dlse: Tensor | None, dentropy: Tensor | None, wanted: Wanted
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """By those of the backward of `attention`, for 16-bit inputs."""
    from ...kernels.lib.softmax import SLACK  # with Triton, which not every platform has

    q, k, aux = call.q, call.k, call.aux
    dlse, dentropy = (torch.zeros_like(lse) if x is None else x.contiguous() for x in (dlse, dentropy))
    # Attention's kernels lower all that are large. Here only rows with a P of 1 need it; the others keep a sum of 1.
    lowered = torch.where(entropy == 0, lse - lse.abs() * SLACK.value, lse)
    nothing, weights = k[..., :0], dentropy[..., None]
    without_values = Call(q, k, nothing, call.options, aux)
    key = without_values.key, wanted
    plan = _backward_plans.get(key)
    if plan is None:
        module, of_kernels = dispatch.PORTABLE.module, wanted._replace(sinks=False)
        made = module.plan_backward(without_values, q[..., :0], weights, True, of_kernels)
        plan = remember(_backward_plans, key, made)
    with torch.cuda.device_of(q):
        gradients = plan(q, k, nothing, q[..., :0], lowered, weights, dlse - dentropy * entropy, aux)
    sinks = None
    if aux.sinks is not None and wanted.sinks:
        sinks = tiled.sink_gradient(aux.sinks, lse, entropy, dlse, dentropy)
    rest = [x for x in (sinks, *gradients.score_aux) if x is not None]
    return gradients.q, gradients.k, [*map(laid_out_like, rest, wanted_tensors(aux, wanted))]


def _fake_forward(q: Tensor, k: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    lse, max_scores, entropy = (one_a_row(q).empty(wide, q.device) for _ in range(3))
    return lse, max_scores, entropy


def _fake_backward(
    q: Tensor, k: Tensor, lse: Tensor, entropy: Tensor, dlse: Tensor | None, dentropy: Tensor | None, *arguments: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    dq, dk = (rows_like(x, x.shape[-1]).empty(x.dtype, x.device) for x in (q, k))
    aux, wanted = aux_of(arguments[:NUM_AUX]), Wanted(arguments[-2], tuple(arguments[-1]))
    return dq, dk, [*map(torch.empty_like, wanted_tensors(aux, wanted))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k = inputs[:2]
    lse, _, entropy = output
    aux, ctx.options = aux_of(inputs[2 : 2 + NUM_AUX]), inputs[2 + NUM_AUX :]  # and the backend
    ctx.layout = AuxLayout.of(aux)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, lse, entropy, *aux.tensors)


def _differentiate(ctx: Any, dlse: Tensor | None, dmax: None, dentropy: Tensor | None) -> tuple[Any, ...]:
    q, k, lse, entropy, *tensors = ctx.saved_tensors
    aux = ctx.layout.restore(tensors)
    wanted = Wanted(bool(ctx.needs_input_grad[2]), tuple(ctx.needs_input_grad[2 + NUM_AUX - 1]))
    arguments = *aux_arguments(aux), *ctx.options, wanted.sinks, list(wanted.score_aux)
    dq, dk, flat = torch.ops.cs336_systems.statistics_backward(q, k, lse, entropy, dlse, dentropy, *arguments)
    sinks, of_score_aux = unflatten(flat, wanted)
    none = [None] * (NUM_AUX - 3)
    return dq, dk, sinks, *none, [None] * len(aux.mask_aux), [*of_score_aux], *[None] * (NUM_OPTIONS + 1)


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(TWICE)


for name, schema, function, fake in (
    ("statistics_forward", FORWARD, _forward, _fake_forward),
    ("statistics_backward", BACKWARD, _backward, _fake_backward),
):
    library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
torch.library.register_autograd(f"{NAMESPACE}::statistics_forward", _differentiate, setup_context=_keep, lib=library)
torch.library.register_autograd(f"{NAMESPACE}::statistics_backward", _refuse, lib=library)
