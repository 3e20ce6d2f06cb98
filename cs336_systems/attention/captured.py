"""What rules captured: checks against the sizes of a call, and the sizes that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..kernels.mods import DISTANCE, code_of
from ..kernels.rules import Leaf, axes_read
from .sizes import Sizes
from .tracing.tables import Table


def check_captured(
    name: str,
    rules: Iterable[Leaf],
    tensors: tuple[Tensor | Table, ...],
    sizes: Sizes,
    device: torch.device,
) -> None:
    """What rules captured has to be on q's device, and as large as what it is read for.

    Raises:
        ValueError: a tensor is on another device, has another shape than its rule reads, or needs a gradient that the
            rule does not have.
    """
    full, rest = _size_of_axes(sizes), iter(tensors)
    for leaf in rules:
        for slot in (slot for slot, item in enumerate(leaf[1]) if item is None):
            tensor, code = next(rest), code_of(leaf[0])
            axes = code.axes.get(slot)
            if isinstance(tensor, Table):
                for each in tensor.captured:
                    check_captured(name, (), (each,), sizes, device)
                continue
            if tensor.device != device:
                raise ValueError(f"what {name} captured must be on {device} to match q; got {tensor.device}")
            if axes is None:
                _check_needs_no_gradient(name, tensor)
                continue
            expected, own = tuple(full[axis] for axis in axes), tuple(tensor.shape)
            # What lies beyond the call is never read, and `within_call` leaves it out where a gradient is computed.
            longer = slot not in code.gradients or not sizes.note
            fits = [
                broadcasts(x, y) or ((longer or axis == DISTANCE) and x > y)
                for x, y, axis in zip(own, expected, axes, strict=False)
            ]
            if len(own) != len(expected) or not all(fits):
                shape = f"{expected} at least" if longer else f"{expected}"
                raise ValueError(
                    f"what {name} captured must have shape {shape}, for {' '.join(axes)}, or 1 there; got {own}"
                    f"{sizes.note}"
                )
            if slot in code.origins and own[-1] != 1:
                _check_origin(name, own[-1], code.origin(slot, leaf[1]), sizes)


def _check_needs_no_gradient(name: str, tensor: Tensor) -> None:
    """What is read at other indices than axes has a gradient only if it was gathered, as it is where one is needed."""
    if name == "scores" and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "scores must be made again: the score_mod was made when a tensor that it reads needed no gradient"
        )


def within_call(rules: Iterable[Leaf], tensors: tuple[Tensor, ...], sizes: Sizes) -> tuple[Tensor, ...]:
    """What rules captured, without what lies beyond the call where a gradient is computed: autograd makes that 0."""
    full, rest, found = _size_of_axes(sizes), iter(tensors), []
    for name, captured in rules:
        for slot in (slot for slot, item in enumerate(captured) if item is None):
            tensor, gradient = next(rest), code_of(name).gradients.get(slot)
            for axis, own in enumerate(gradient.axes if gradient is not None else ()):
                if own != DISTANCE and tensor.shape[axis] > full[own] and tensor.shape[axis] != 1:
                    tensor = tensor.narrow(axis, 0, full[own])
            found.append(tensor)
    return tuple(found)


def _size_of_axes(sizes: Sizes) -> dict[str, int]:
    return {
        "batch": math.prod(sizes.batch),
        "head": sizes.num_heads,
        "row": sizes.q_len,
        "column": sizes.k_len,
        DISTANCE: sizes.q_len + sizes.k_len - 1,
    }


def _check_origin(name: str, length: int, origin: int, sizes: Sizes) -> None:
    """An axis that is read at column - row + origin has to reach as far as the call's distances, both ways."""
    if sizes.note:
        raise ValueError(
            f"max_seqlen_q and max_seqlen_k must be given for what {name} captured for distances; got None"
        )
    if sizes.q_len == 0 or sizes.k_len == 0:
        return
    if origin < sizes.q_len - 1 or length - origin < sizes.k_len:
        raise ValueError(
            f"what {name} captured for distances must have at least {sizes.q_len - 1} elements before its origin, and "
            f"{sizes.k_len} from there on; got {origin} and {length - origin}"
        )


def broadcasts(size: int, full: int) -> bool:
    """Whether an axis of this size serves one of the full size."""
    # torch.compile does not find a size that it knows by a name in (1, full).
    return size == 1 or size == full


def size_along(axis: str, rules: Iterable[Leaf], tensors: tuple[Tensor, ...]) -> int | None:
    """The size of the captured tensors that rules read along an axis; None if it is 1 for all of them.

    A call may have fewer entries than they have, so the smallest if they differ.
    """
    known = [(axes, x.shape) for axes, x in axes_read(rules, tensors) if axis in axes and x.ndim == len(axes)]
    sizes = [shape[axes.index(axis)] for axes, shape in known]
    return min((size for size in sizes if size != 1), default=None)
