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
Place = Callable[[Shape, Draw], Tensor]
"""Makes one tensor of a shape, in some arrangement in memory."""


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


def contiguous(shape: Shape, draw: Draw) -> Tensor:
    """Row-major."""
    return draw(shape)


def length_before_heads(shape: Shape, draw: Draw) -> Tensor:
    """(..., length, heads, width) in memory, as a projection leaves it; (length, batch, width) without heads."""
    return draw((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-3, -2)


def padded_rows(shape: Shape, draw: Draw) -> Tensor:
    """Rows further apart than they are wide, by an odd number of elements."""
    return draw((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]


def spaced_columns(shape: Shape, draw: Draw) -> Tensor:
    """Every second element, so the last stride is 2."""
    return draw((*shape[:-1], 2 * shape[-1]))[..., ::2]


def column_major(shape: Shape, draw: Draw) -> Tensor:
    """Rows contiguous across, so the last stride is the length."""
    return draw((*shape[:-2], shape[-1], shape[-2])).mT


def misaligned(shape: Shape, draw: Draw) -> Tensor:
    """Contiguous, from an address that is no multiple of 16 bytes."""
    return draw((math.prod(shape) + 1,))[1:].view(shape)


def shared_by_heads(shape: Shape, draw: Draw) -> Tensor:
    """One matrix for all heads, or for the whole batch where there are none: stride 0."""
    return draw((*shape[:-3], 1, *shape[-2:])).expand(shape)


def shared_by_batch(shape: Shape, draw: Draw) -> Tensor:
    """One entry for the whole batch: stride 0."""
    return draw((1, *shape[1:])).expand(shape)


def shared_by_rows(shape: Shape, draw: Draw) -> Tensor:
    """One row for the whole length: stride 0."""
    return draw((*shape[:-2], 1, shape[-1])).expand(shape)


PLACES: dict[str, tuple[Place, Place]] = {
    "contiguous": (contiguous, contiguous),
    "length_before_heads": (length_before_heads, length_before_heads),
    "padded_rows": (padded_rows, padded_rows),
    "spaced_columns": (spaced_columns, spaced_columns),
    "column_major": (column_major, column_major),
    "misaligned": (misaligned, misaligned),
    "kv_shared_by_heads": (contiguous, shared_by_heads),
    "kv_shared_by_batch": (contiguous, shared_by_batch),
    "q_shared_by_rows": (shared_by_rows, contiguous),
    "mixed": (column_major, length_before_heads),
}
"""Arrangements that each tensor can have by itself: of q, and of k and v."""

LAYOUTS = (*PLACES, "packed")
"""The names that `make_inputs` takes; "packed" is one projection (..., length, all heads of q, k and v) in slices."""


def packed(shapes: Shapes, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one tensor. Their lengths must agree."""
    q, k, _ = shapes
    if q[-2] != k[-2]:
        raise ValueError(f"k must have the length of q, {q[-2]}, to be packed with it; got {k[-2]}")
    has_heads = len(q) >= 4
    leading = q[:-3] if has_heads else q[:-2]
    widths = [shape[-3] * shape[-1] if has_heads else shape[-1] for shape in shapes]
    slices = draw((*leading, q[-2], sum(widths))).split(widths, dim=-1)
    if not has_heads:
        return slices
    heads = [part.unflatten(-1, (shape[-3], shape[-1])) for part, shape in zip(slices, shapes, strict=True)]
    return heads[0].transpose(-3, -2), heads[1].transpose(-3, -2), heads[2].transpose(-3, -2)


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
        q_place, kv_place = PLACES[layout]
        q, k, v = q_place(shapes.q, draw), kv_place(shapes.k, draw), kv_place(shapes.v, draw)
    dout = draw((*shapes.q[:-1], shapes.v[-1]))
    dlse = torch.randn(
        shapes.q[:-1], dtype=torch.promote_types(dtype, torch.float32), device=device, generator=generator
    )
    return Inputs(q, k, v, dout, dlse)
