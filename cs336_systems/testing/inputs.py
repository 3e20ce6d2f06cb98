"""Random inputs for a call of attention, in any arrangement in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]
Draw = Callable[[Shape], Tensor]
"""Fills a new contiguous tensor of some shape."""
Arrangement = Callable[[Shape, Draw], Tensor]
"""Makes one tensor of a shape, with some strides."""


class Shapes(NamedTuple):
    """The shapes of q, k and v."""

    q: Shape
    k: Shape
    v: Shape

    @classmethod
    def of(
        cls,
        *leading: int,
        q_len: int,
        k_len: int | None = None,
        d: int,
        dv: int | None = None,
        q_heads: int | None = None,
        kv_heads: int | None = None,
    ) -> Shapes:
        """(*leading, [heads,] length, width); keys are as queries, and values as keys, unless said otherwise."""
        q_axes = () if q_heads is None else (q_heads,)
        kv_axes = q_axes if kv_heads is None else (kv_heads,)
        k_len = q_len if k_len is None else k_len
        k_leading = (*leading, *kv_axes, k_len)
        return cls((*leading, *q_axes, q_len, d), (*k_leading, d), (*k_leading, d if dv is None else dv))


class Inputs(NamedTuple):
    """The tensors of a call, and gradients of what it returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype; the gradient of the log-sum-exp in the one that it then has."""
        q, k, v, dout, dlse = self
        wide = torch.promote_types(dtype, torch.float32)
        return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype), dlse.to(wide))


def _misaligned(shape: Shape, draw: Draw) -> Tensor:
    return draw((math.prod(shape) + 1,))[1:].view(shape)


ARRANGEMENTS: dict[str, Arrangement] = {
    "contiguous": lambda shape, draw: draw(shape),
    # (..., length, heads, width) in memory, as a projection leaves it; (length, batch, width) without heads.
    "length_before_heads": lambda shape, draw: draw((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-3, -2),
    # Rows further apart than they are wide, by an odd number of elements.
    "padded_rows": lambda shape, draw: draw((*shape[:-1], shape[-1] + 3))[..., : shape[-1]],
    # Every second element, so the last stride is 2.
    "spaced_columns": lambda shape, draw: draw((*shape[:-1], 2 * shape[-1]))[..., ::2],
    # Columns are contiguous, so the last stride is the length.
    "column_major": lambda shape, draw: draw((*shape[:-2], shape[-1], shape[-2])).mT,
    # Contiguous, from an address that is no multiple of 16 bytes.
    "misaligned": _misaligned,
    # One matrix for all heads (for the whole batch where there are none), one entry for the batch, one row for all.
    "shared_by_heads": lambda shape, draw: draw((*shape[:-3], 1, *shape[-2:])).expand(shape),
    "shared_by_batch": lambda shape, draw: draw((1, *shape[1:])).expand(shape),
    "shared_by_rows": lambda shape, draw: draw((*shape[:-2], 1, shape[-1])).expand(shape),
}
OF_Q_AND_KV: dict[str, tuple[str, str]] = {
    **{name: (name, name) for name in tuple(ARRANGEMENTS)[:6]},
    "kv_shared_by_heads": ("contiguous", "shared_by_heads"),
    "kv_shared_by_batch": ("contiguous", "shared_by_batch"),
    "q_shared_by_rows": ("shared_by_rows", "contiguous"),
    "mixed": ("column_major", "length_before_heads"),
}
"""The arrangements of q, and of k and v, by the name of a layout."""

LAYOUTS = (*OF_Q_AND_KV, "packed")
"""The names that `make_inputs` takes; "packed" is one projection (..., length, all heads of q, k and v) in slices."""


def packed(shapes: Shapes, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one tensor. Their lengths must agree."""
    q_len, k_len = shapes.q[-2], shapes.k[-2]
    if q_len != k_len:
        raise ValueError(f"k must have the length of q, {q_len}, to be packed with it; got {k_len}")
    has_heads = len(shapes.q) >= 4
    leading = shapes.q[:-3] if has_heads else shapes.q[:-2]
    widths = [shape[-3] * shape[-1] if has_heads else shape[-1] for shape in shapes]
    slices = draw((*leading, q_len, sum(widths))).split(widths, dim=-1)
    if not has_heads:
        return slices
    q, k, v = (x.unflatten(-1, (of[-3], of[-1])).transpose(-3, -2) for x, of in zip(slices, shapes, strict=True))
    return q, k, v


def make_inputs(
    shapes: Shapes,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
    generator: torch.Generator | None = None,
) -> Inputs:
    """Standard normal tensors of these shapes, q, k and v in one of `LAYOUTS`, gradients contiguous."""

    def draw(shape: Shape) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if layout == "packed":
        q, k, v = packed(shapes, draw)
    else:
        of_q, of_kv = (ARRANGEMENTS[name] for name in OF_Q_AND_KV[layout])
        q, k, v = of_q(shapes.q, draw), of_kv(shapes.k, draw), of_kv(shapes.v, draw)
    dout = draw((*shapes.q[:-1], shapes.v[-1]))
    wide = torch.promote_types(dtype, torch.float32)
    dlse = torch.randn(shapes.q[:-1], dtype=wide, device=device, generator=generator)
    return Inputs(q, k, v, dout, dlse)
