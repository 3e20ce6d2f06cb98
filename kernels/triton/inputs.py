"""What the kernels read: the tensors of a call, or, for float32 ones, their float16 parts for the time of that call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..launching import Launch, Launcher
from ..tuning import Arithmetic
from .geometry import Geometry, in_units
from .rewrite import measure_kernel, rewrite_kernel

ELEMENTS_A_TILE = 4096
MOST_ELEMENTS_A_GROUP = 1 << 15
"""Up to this size of a group, each program measures a whole one and rewrites its share of it, in one launch."""
ELEMENTS_A_BITE = 1 << 13
"""What such a program reads at a time: enough loads in flight that it does not wait for each."""
PROGRAMS_TO_SHARE = 128
"""How many programs such a launch aims at: about one for each processor of a large GPU."""
SLOTS = 32
"""How many programs measure a larger group, in a launch before that."""
NO_STATISTICS = (None, None, None, None)


class Input(NamedTuple):
    """A tensor of 16-bit elements, its statistics, and the distances to its further parts.

    statistics (groups, 2) holds each group's largest magnitude and, for v and dout in the backward, largest norm of a
    row, a group being the matrices of q that share one of k; it is None for a tensor that was 16-bit to begin with.
    """

    tensor: Tensor
    statistics: Tensor | None
    distances: tuple[int, ...]


class Inputs(NamedTuple):
    """Where the kernels find their inputs: addresses for every launch, tensors only for those that are new."""

    addresses: tuple[int, ...]
    statistics: tuple[int | None, ...]
    describe: Callable[[], list[Input]]


class PartsPlan(NamedTuple):
    """What follows from the metadata of float32 inputs that are rewritten as parts.

    parts_each: how many parts an input has. elements: of the buffer of all parts; starts: where each input's begin in
    it. groups: how many there are, each with statistics of its own. shares: how many programs rewrite a group, each of
    which measures it too; None where `measure_kernel` does. statistics: how many numbers those of the groups and what
    `measure_kernel` writes before take together.
    """

    parts_each: int
    elements: int
    starts: tuple[int, ...]
    groups: int
    shares: int | None
    statistics: int
    measure: Launcher
    rewrite: Launcher


def plan_parts(tensors: list[Tensor], arithmetic: Arithmetic) -> PartsPlan | None:
    """How q, k, v and perhaps dout are rewritten; None for 16-bit ones, which are read as they are."""
    if arithmetic == "half":
        return None
    count = 2 if arithmetic == "float32" else 1
    groups = math.prod(tensors[1].shape[:-2])
    sizes = [count * math.prod(tensor.shape[:-1]) * row_of_parts(tensor.shape[-1]) for tensor in tensors]
    *starts, elements = (0, *itertools.accumulate(sizes))
    largest = max(tensor.numel() for tensor in tensors) // max(1, groups)
    shares = None
    if largest <= MOST_ELEMENTS_A_GROUP:
        bites = triton.cdiv(largest, ELEMENTS_A_BITE)
        shares = max(1, min(bites, PROGRAMS_TO_SHARE // max(1, groups * len(tensors))))
    statistics = 2 * len(tensors) * groups * (1 if shares else 1 + SLOTS)
    launchers = Launcher(measure_kernel), Launcher(rewrite_kernel)
    return PartsPlan(count, elements, tuple(starts), groups, shares, statistics, *launchers)


def as_inputs(tensors: list[Tensor], plan: PartsPlan | None) -> Inputs:
    """q, k, v and perhaps dout, each (*leading, rows, width), as the kernels read them."""
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    if plan is None:
        return Inputs(addresses, NO_STATISTICS[: len(tensors)], lambda: [Input(tensor, None, ()) for tensor in tensors])
    device = tensors[0].device
    parts = torch.empty(plan.elements, dtype=torch.float16, device=device)
    statistics = torch.empty(plan.statistics, dtype=torch.float32, device=device)
    first, first_statistics, count = parts.data_ptr(), statistics.data_ptr(), len(tensors)
    inputs = Inputs(
        tuple([first + 2 * start for start in plan.starts]),
        tuple([first_statistics + 8 * plan.groups * index for index in range(count)]),
        lambda: _views(tensors, plan, parts, statistics),
    )
    absent = NO_STATISTICS[count:]
    partials = None if plan.shares else first_statistics + 8 * plan.groups * count
    if partials is not None:
        plan.measure((*addresses, *absent, partials), lambda: describe_measure(tensors, plan, statistics))
    plan.rewrite(
        (*addresses, *absent, first_statistics, partials, *inputs.addresses, *absent),
        lambda: describe_rewrite(tensors, plan, statistics, inputs.describe()),
    )
    return inputs


def row_of_parts(width: int) -> int:
    """Elements in a row of parts: padded to 32 bytes, so that rows are read in whole vectors."""
    return math.ceil(width / 16) * 16


def _views(tensors: list[Tensor], plan: PartsPlan, parts: Tensor, statistics: Tensor) -> list[Input]:
    """The parts of each tensor, as tensors."""
    views = []
    final, _ = _split(tensors, plan, statistics)
    for tensor, start, own in zip(tensors, plan.starts, final.view(len(tensors), -1, 2), strict=True):
        shape = (plan.parts_each, *tensor.shape[:-1], row_of_parts(tensor.shape[-1]))
        own_parts = parts[start : start + math.prod(shape)].view(shape)
        distances = (own_parts.stride(0),) if plan.parts_each == 2 else ()
        views.append(Input(own_parts[0, ..., : tensor.shape[-1]], own, distances))
    return views


def _split(tensors: list[Tensor], plan: PartsPlan, statistics: Tensor) -> tuple[Tensor, Tensor]:
    """The statistics of all groups, and what `measure_kernel` writes before."""
    final = 2 * len(tensors) * plan.groups
    return statistics[:final], statistics[final:]


def describe_measure(tensors: list[Tensor], plan: PartsPlan, statistics: Tensor) -> Launch:
    """The launch of `measure_kernel` on q, k, v and perhaps dout."""
    geometry = Geometry.of(tensors[0], tensors[1], tensors[2])
    missing = 4 - len(tensors)
    strides, units = in_units(tensors)
    strides += [(0,) * tensors[0].ndim] * missing
    return Launch(
        (geometry.kv_matrices * SLOTS, len(tensors)),
        (*tensors, *[None] * missing, _split(tensors, plan, statistics)[1]),
        (*geometry.sizes, *strides, geometry.kv_matrices, geometry.group, geometry.q_len, geometry.k_len),
        {
            **geometry.widths,
            "TILE": _rows(geometry, ELEMENTS_A_TILE),
            "UNITS": units + (1,) * missing,
            "SLOTS": SLOTS,
        },
        {},
    )


def describe_rewrite(tensors: list[Tensor], plan: PartsPlan, statistics: Tensor, inputs: list[Input]) -> Launch:
    """The launch of `rewrite_kernel` from q, k, v and perhaps dout into ``inputs``."""
    geometry = Geometry.of(tensors[0], tensors[1], tensors[2])
    missing = 4 - len(tensors)
    absent = [(0,) * tensors[0].ndim] * missing
    strides, units = in_units(tensors)
    strides += [*absent, *[x.tensor.stride() for x in inputs], *absent]
    distances = (*[x.distances for x in inputs], *[()] * missing)
    final, partials = _split(tensors, plan, statistics)
    measured = plan.shares is None
    tile = _rows(geometry, ELEMENTS_A_TILE if measured else ELEMENTS_A_BITE)
    return Launch(
        (_tiles(geometry, tile) if plan.shares is None else geometry.kv_matrices * plan.shares, len(tensors)),
        (
            *(*tensors, *[None] * missing, final, partials if measured else None),
            *(*[x.tensor for x in inputs], *[None] * missing),
        ),
        (
            *geometry.sizes,
            *strides,
            distances,
            geometry.kv_matrices,
            geometry.group,
            geometry.q_len,
            geometry.k_len,
            plan.shares or 0,
        ),
        {
            **geometry.widths,
            "TILE": tile,
            "UNITS": units + (1,) * missing,
            "SLOTS": SLOTS if measured else 0,
        },
        {"num_warps": 4 if measured else 8},
    )


def _rows(geometry: Geometry, elements: int) -> int:
    """Rows of a tile of so many elements."""
    return max(16, elements // geometry.block)


def _tiles(geometry: Geometry, tile: int) -> int:
    """Tiles of the tensor that has most."""
    of_q = geometry.group * triton.cdiv(geometry.q_len, tile)
    return geometry.kv_matrices * max(of_q, triton.cdiv(geometry.k_len, tile))
