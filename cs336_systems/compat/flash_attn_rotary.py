"""The functions of ``flash_attn.layers.rotary``: rotary position embeddings with given cosines and sines."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..kernels.torch_names import must_dispatch


def apply_rotary_emb(
    x: Float[Tensor, "*batch length heads d"],
    cos: Float[Tensor, "positions pairs"],
    sin: Float[Tensor, "positions pairs"],
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Int[Tensor, " sequences"] = 0,
    cu_seqlens: Int[Tensor, " sequences+1"] | None = None,
    max_seqlen: int | None = None,
) -> Float[Tensor, "*batch length heads d"]:
    """Rotate pairs of the first 2 * pairs elements of each row of x by the angles of its position.

    Args:
        x: (batch, length, heads, d); or packed sequences (all rows, heads, d) with ``cu_seqlens``.
        cos, sin: (positions, pairs), with 2 * pairs <= d; may have another floating-point dtype than x.
        interleaved: whether pairs are elements (0, 1), (2, 3) and so on; element i and i + pairs if False.
        inplace: write the result to x, and return x.
        seqlen_offsets: position of the first row, an int or (sequences,) int32 or int64.
        cu_seqlens: (sequences + 1,) cumulative lengths of packed sequences, int32 or int64.
        max_seqlen: not needed here.

    Computed in float32, or float64 if x is; differentiable in x, also ``inplace``, and in cos and sin.

    Returns:
        the rotated x, in its shape and dtype.

    Raises:
        TypeError, ValueError: shapes, dtypes or positions do not fit. Positions on a GPU are not read: those out of
            range fail a device-side assertion.
    """
    check_tables(x, cos, sin, expected=3 if cu_seqlens is not None else 4)
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = _positions(x, cos, seqlen_offsets, cu_seqlens)
    # Indexing would take a negative position for one from the end; embedding refuses it.
    cos, sin = ((t[rows] if isinstance(rows, slice) else F.embedding(rows, t)).to(dtype) for t in (cos, sin))
    out = apply_rotary_emb_torch(x, cos, sin, interleaved).to(x.dtype)
    return x.copy_(out) if inplace else out


def apply_rotary_emb_torch(
    x: Float[Tensor, "*batch length heads d"],
    cos: Float[Tensor, "*batch length pairs"],
    sin: Float[Tensor, "*batch length pairs"],
    interleaved: bool = False,
) -> Float[Tensor, "*batch length heads d"]:
    """`apply_rotary_emb` for rows at positions 0, 1, ... of cos and sin, in the dtype that torch promotes all three to.

    cos and sin are (length, pairs), or (batch, length, pairs) for positions that differ.
    """
    rotated = 2 * cos.shape[-1]
    if rotated > x.shape[-1] or cos.shape != sin.shape:
        raise ValueError(_expected(x, cos, sin))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = x[..., :rotated].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2), x[..., rotated:]), -1)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor, *, expected: int) -> None:
    """Raise unless x has this number of axes, and cos and sin are tables of angles for it."""
    for name, tensor, ndim in (("x", x, expected), ("cos", cos, 2), ("sin", sin, 2)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be a tensor of floating-point numbers; got {got}")
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} axes; got {tuple(tensor.shape)}")
    if cos.shape != sin.shape or 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(_expected(x, cos, sin))


def _expected(x: Tensor, cos: Tensor, sin: Tensor) -> str:
    return (
        f"cos and sin must have the same shape, with at most {x.shape[-1] // 2} pairs for x of {x.shape[-1]} columns; "
        f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
    )


def _positions(x: Tensor, cos: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> slice | Tensor:
    """Which rows of cos the rows of x have."""
    length = x.shape[-3]
    if cu_seqlens is None and not isinstance(offsets, Tensor):
        _check_range(offsets, offsets + length, cos)
        return slice(offsets, offsets + length)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if isinstance(offsets, Tensor) and tuple(offsets.shape) != (sequences,):
        raise ValueError(f"seqlen_offsets must be an int or have shape ({sequences},); got {tuple(offsets.shape)}")
    if cu_seqlens is None:
        positions = torch.arange(length, device=x.device) + torch.as_tensor(offsets)[:, None]
    else:
        rows = torch.arange(length, device=x.device, dtype=cu_seqlens.dtype)
        sequence = torch.bucketize(rows, cu_seqlens[1:-1], right=True)
        positions = rows + (offsets - cu_seqlens[:-1])[sequence]
    if positions.device.type == "cpu" and not must_dispatch(positions) and positions.numel():
        _check_range(int(positions.min()), int(positions.max()) + 1, cos)
    return positions


def _check_range(first: int, end: int, cos: Tensor) -> None:
    if first < 0 or end > cos.shape[0]:
        raise ValueError(
            f"positions, which begin at seqlen_offsets, must be from 0 to {cos.shape[0] - 1}, the last row of cos; "
            f"got {first} to {end - 1}"
        )
