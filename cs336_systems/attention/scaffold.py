"""Scaffolding until the dispatcher replaces `ops`: the operators' arguments as a `Call` for the Triton backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import Aux, Call, Options, Wanted
from ..kernels.launching import plan_caches
from ..kernels.rules import leaves, registry, tensors_of
from ..kernels.settings import Settings
from ..kernels.triton import backend

_plans: dict[Any, Any] = {}
plan_caches.append(_plans)


def _key(tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    return tuple([x if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def as_options(scale: float, settings: Settings) -> Options:
    from .variants.softcap import softcap

    name = softcap(1.0).expression[0][0]
    registry["softcap"] = registry[name]
    scores, cap = settings.scores, None
    if scores and scores[0][0] == name:
        cap, scores = scores[0][1][0], scores[1:]
    left, right = settings.window
    if settings.causal != "none":
        right = 0 if right is None else min(right, 0)
    most = settings.packed or (None, None)
    return Options(
        scale, left, right, settings.to_the_end, cap, settings.dropout or 0.0, settings.mask, scores, *most,
        settings.deterministic,
    )  # fmt: skip


def as_aux(settings: Settings, extras: Sequence[Tensor]) -> Aux:
    rest = iter(extras)
    named: dict[str, Any] = {}
    if settings.sinks:
        named["sinks"] = next(rest)
    if settings.dropout is not None:
        named["seed"] = next(rest)
    if settings.blocks:
        named |= {"block_rows": next(rest), "block_columns": next(rest)}
    if settings.packed is not None:
        named |= {"cu_seqlens_q": next(rest), "cu_seqlens_k": next(rest)}
    count = sum(tensors_of(leaf) for leaf in leaves(settings.mask))
    return Aux(**named, mask_aux=tuple([next(rest) for _ in range(count)]), score_aux=tuple(rest))


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    parsed = Settings.of(settings, numbers)
    aux = as_aux(parsed, extras)
    key = ("forward", _key([q, k, v, *extras]), scale, settings, *numbers, torch.get_float32_matmul_precision())
    plan = _plans.get(key)
    if plan is None:
        call = Call(q, k, v, as_options(scale, parsed), aux)
        reason = backend.supports(call)
        assert reason is None, reason
        plan = _plans[key] = backend.plan_forward(call)
    return plan(q, k, v, aux)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, scale: float,
    settings: str, numbers: Sequence[float], extras: Sequence[Tensor], wanted: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    parsed = Settings.of(settings, numbers)
    aux = as_aux(parsed, extras)
    first = len(extras) - len(aux.score_aux)
    which = Wanted(parsed.sinks and 0 in wanted, tuple(n + first in wanted for n in range(len(aux.score_aux))))
    key = ("backward", _key([q, k, v, out, dout, *extras]), dlse is None, scale, settings, *numbers, which)
    key = (*key, torch.get_float32_matmul_precision())
    plan = _plans.get(key)
    if plan is None:
        call = Call(q, k, v, as_options(scale, parsed), aux)
        plan = _plans[key] = backend.plan_backward(call, out, dout, dlse is not None, which)
    gradients = plan(q, k, v, out, lse, dout, dlse, aux)
    found: list[Any] = [gradients.sinks if parsed.sinks and n == 0 else gradients.score_aux[n - first] for n in wanted]
    return gradients.q, gradients.k, gradients.v, found


def decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, before: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    aux = Aux(cache_lengths=lengths)
    options = Options(scale, window_left=before, window_right=0, softcap=softcap)
    key = ("decode", _key([q, k, v, lengths]), options, torch.get_float32_matmul_precision())
    plan = _plans.get(key)
    if plan is None:
        call = Call(q, k, v, options, aux)
        reason = backend.supports(call)
        assert reason is None, reason
        plan = _plans[key] = backend.plan_forward(call)
    return plan(q, k, v, aux)
