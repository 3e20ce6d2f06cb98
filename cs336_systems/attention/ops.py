"""The flash kernels as torch operators, so that tracing, fake tensors and dispatch modes see them.

``cs336_systems::flash_forward`` and ``flash_backward`` are opaque: torch.compile calls them as they are. Kernels are
imported when the first real tensor arrives, so that a machine without Triton can import this package.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.layout import one_a_row, rows_like
from ..kernels.settings import MOST_ROWS
from ..kernels.torch_names import modes_at_work, transform_level

NAMESPACE = "cs336_systems"
PLAIN = {Tensor, torch.nn.Parameter}

FORWARD = (
    "(Tensor q, Tensor k, Tensor v, float scale, str settings, Scalar[] numbers, Tensor[] extras) -> (Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, float scale, "
    "str settings, Scalar[] numbers, Tensor[] extras, int[] wanted) -> (Tensor, Tensor, Tensor, Tensor[])"
)
"""What an implementation's operators take and return."""

library = torch.library.Library(NAMESPACE, "DEF")


def define(implementation: str) -> None:
    """Declare an implementation's two operators."""
    library.define(f"{implementation}_forward{FORWARD}", tags=(torch.Tag.pt2_compliant_tag,))
    library.define(f"{implementation}_backward{BACKWARD}", tags=(torch.Tag.pt2_compliant_tag,))


define("flash")


@functools.cache
def kernels() -> ModuleType:
    """The module that launches the kernels: with a Hopper GPU the one that knows of those for it."""
    from . import scaffold

    return scaffold


def check_rows(q: Tensor, k: Tensor) -> None:
    """What is traced for all lengths is checked when it runs; other calls are when an implementation is chosen.

    Raises:
        ValueError: q or k has more rows than kernels count.
    """
    if max(q.shape[-2], k.shape[-2]) > MOST_ROWS:
        raise ValueError(f"q and k must have at most {MOST_ROWS} rows; got {q.shape[-2]} and {k.shape[-2]}")


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    check_rows(q, k)
    return kernels().forward(q, k, v, scale, settings, numbers, extras)


def _backward(
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
    # vmap may expand them with a stride of 0 along the batch; kernels take the log-sum-exp as contiguous.
    out, lse = out if out.stride(-1) == 1 else out.contiguous(), lse.contiguous()
    return kernels().backward(q, k, v, out, lse, dout, dlse, scale, settings, numbers, extras, wanted)


for _device in ("CUDA", "CPU"):
    library.impl("flash_forward", _forward, _device)
    library.impl("flash_backward", _backward, _device)


@torch.library.register_fake(f"{NAMESPACE}::flash_forward", lib=library)  # type: ignore[untyped-decorator]
def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    return rows_like(q, v.shape[-1]).empty(q.dtype, q.device), one_a_row(q).empty(torch.float32, q.device)


@torch.library.register_fake(f"{NAMESPACE}::flash_backward", lib=library)  # type: ignore[untyped-decorator]
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
    dq, dk, dv = (rows_like(x, x.shape[-1]).empty(x.dtype, x.device) for x in (q, k, v))
    return dq, dk, dv, [torch.empty_like(extras[position]) for position in wanted]


def _leading(info: Any, in_dims: Sequence[Any], *tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors of a call under vmap with its axis first, expanded where a tensor has none."""
    moved: list[Tensor | None] = []
    for tensor, axis in zip(tensors, in_dims, strict=True):
        if tensor is None:
            moved.append(None)
        else:
            moved.append(tensor.expand(info.batch_size, *tensor.shape) if axis is None else tensor.movedim(axis, 0))
    return moved


def _one_by_one(info: Any, in_dims: Any, operator: Any, *arguments: Any) -> Any:
    """An operator for each entry along vmap's axis, and the results stacked."""

    def entry(argument: Any, axis: Any, number: int) -> Any:
        if isinstance(argument, (list, tuple)) and isinstance(axis, (list, tuple)):
            return [entry(item, own, number) for item, own in zip(argument, axis, strict=True)]
        return argument if axis is None else argument.select(axis, number)

    results = [
        operator(*[entry(argument, axis, number) for argument, axis in zip(arguments, in_dims, strict=True)])
        for number in range(info.batch_size)
    ]
    return tuple(
        [torch.stack(parts) for parts in zip(*column, strict=True)]
        if isinstance(column[0], list)
        else torch.stack(column)
        for column in zip(*results, strict=True)
    )


def register_vmap(implementation: str) -> None:
    """Give an implementation's two operators their rules for vmap."""

    def forward(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        operator, extras = getattr(torch.ops.cs336_systems, f"{implementation}_forward"), others[-1]
        if extras:
            # What rules captured is numbered by the batch entries and heads of one call.
            return _one_by_one(info, in_dims, operator, q, k, v, *others), (0, 0)
        return operator(*_leading(info, in_dims[:3], q, k, v), *others), (0, 0)

    def backward(info: Any, in_dims: Any, *arguments: Any) -> Any:
        operator = getattr(torch.ops.cs336_systems, f"{implementation}_backward")
        *_, extras, wanted = arguments
        if extras:
            return _one_by_one(info, in_dims, operator, *arguments), (0, 0, 0, [0] * len(wanted))
        return operator(*_leading(info, in_dims[:7], *arguments[:7]), *arguments[7:]), (0, 0, 0, [])

    for way, rule in (("forward", forward), ("backward", backward)):
        torch.library.register_vmap(f"{NAMESPACE}::{implementation}_{way}", rule, lib=library)


register_vmap("flash")


def transforming() -> bool:
    """Whether a transform of `torch.func` such as vmap is at work, and torch.compile, which traces it, is not."""
    return not torch.compiler.is_compiling() and transform_level() is not None


def must_dispatch(*tensors: Tensor) -> bool:
    """Whether something other than this process's own kernels has to see the call: tracing, a mode, a subclass.

    Otherwise the operators' implementations can be called as plain functions, which spares a short sequence the cost
    of going through the dispatcher.
    """
    if torch.compiler.is_compiling() or modes_at_work() or transforming():
        return True
    return not PLAIN.issuperset(map(type, tensors))


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, settings: str, numbers: Sequence[float], extras: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out and log-sum-exp of q (*leading, q_len, d), k, v (*leading, k_len, d or dv), at least one leading axis.

    ``settings`` and ``numbers`` stand for a `Settings`, and ``extras`` are the tensors that it asks for.
    """
    if must_dispatch(q, k, v, *extras):
        return torch.ops.cs336_systems.flash_forward(q, k, v, scale, settings, list(numbers), list(extras))
    return kernels().forward(q, k, v, scale, settings, numbers, extras)


def flash_backward(
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
    """Gradients of q, k and v, and of the extras ``wanted``, from those of out and, unless None, of the log-sum-exp."""
    if must_dispatch(q, k, v, out, lse, dout, *extras):
        return torch.ops.cs336_systems.flash_backward(
            q, k, v, out, lse, dout, dlse, scale, settings, list(numbers), list(extras), list(wanted)
        )
    return kernels().backward(q, k, v, out, lse, dout, dlse, scale, settings, numbers, extras, wanted)
