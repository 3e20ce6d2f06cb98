"""What torch.export, and torch.compile of tiled, write down of a call: one operator for any lengths, with a gradient.

An autograd Function would not do. An exported program keeps what its forward does and forgets its backward, so that a
gradient would be missing without a word; and the loops of the tiled forward would be written out for one length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import rows_like
from ..kernels.settings import Settings, bits_of
from . import ops, tiled
from .derivatives import TWICE
from .pairs import Extras
from .precision import without_autocast
from .spec import AttentionSpec, Causal

Numbers = Sequence[float | torch.SymInt]


def exported(
    kind: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp by the operator ``kind``_forward, "flash" or "tiled"."""
    operator = getattr(torch.ops.cs336_systems, f"{kind}_forward")
    scale, settings, numbers = spec.operands
    return operator(q, k, v, scale, settings, writable(numbers), list(extras))


def writable(numbers: Numbers) -> list[Any]:
    """Numbers as torch.export.save can write them: it takes no empty list of them, and no floats among integers."""
    # Settings are read for as many numbers as they ask for: one more does no harm.
    return [bits_of(number) if isinstance(number, float) else number for number in numbers] or [0]


def _spec_of(scale: float, settings: str, numbers: Sequence[float]) -> AttentionSpec:
    given = Settings.of(settings, numbers)
    asked = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    return AttentionSpec(**asked | {"causal": Causal(given.causal), "scale": scale})


def _tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    spec = _spec_of(scale, settings, numbers)
    with without_autocast(q.device):
        return tiled.forward(q, k, v, spec, Extras.of(spec, extras))


def _tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    settings: str,
    numbers: Sequence[float],
    extras: Sequence[Tensor],
    wanted: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = _spec_of(scale, settings, numbers)
    parts = Extras.of(spec, extras)
    before = len(extras) - len(parts.by_scores)
    by_scores = [position in wanted for position in range(before, len(extras))]
    with without_autocast(q.device):
        dq, dk, dv, of_sinks, of_captured = tiled.backward(q, k, v, out, lse, dout, dlse, spec, parts, by_scores)
    # The sinks are the first of the extras, and nothing else before those of scores has a gradient.
    found = [of_sinks if position < before else of_captured[position - before] for position in wanted]
    return dq, dk, dv, [gradient for gradient in found if gradient is not None]


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty_strided(*rows_like(q, v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


def _fake_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    settings: str,
    numbers: Sequence[float],
    extras: Sequence[Tensor],
    wanted: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    return dq, dk, dv, [torch.empty_like(extras[position]) for position in wanted]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings, extras = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *extras)


def _differentiate(operator: str) -> Any:
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *extras = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        needed = ctx.needs_input_grad[-1]
        wanted = [position for position in range(len(extras)) if needed[position]]
        *gradients, of_extras = getattr(torch.ops.cs336_systems, operator)(
            q, k, v, out, lse, dout, dlse, *ctx.settings, extras, wanted
        )
        all_of_extras = [None] * len(extras)
        for position, gradient in zip(wanted, of_extras, strict=True):
            all_of_extras[position] = gradient
        return *gradients, None, None, None, all_of_extras

    return backward


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(TWICE)


ops.define("tiled")
ops.register_vmap("tiled")
for _name, _function, _fake in (
    ("tiled_forward", _tiled_forward, _fake_forward),
    ("tiled_backward", _tiled_backward, _fake_backward),
):
    ops.library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{ops.NAMESPACE}::{_name}", _fake, lib=ops.library)
for _kind in ("flash", "tiled"):
    _forward, _backward = f"{ops.NAMESPACE}::{_kind}_forward", f"{ops.NAMESPACE}::{_kind}_backward"
    torch.library.register_autograd(_forward, _differentiate(f"{_kind}_backward"), setup_context=_keep, lib=ops.library)
    torch.library.register_autograd(_backward, _refuse, lib=ops.library)
