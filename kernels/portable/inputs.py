"""What the kernels read: the tensors of a call, or, for float32 ones, their float16 parts for the time of that call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..launching import Launch, Launcher, Plans
from ..tuning import Arithmetic
from .geometry import Geometry
from .rewrite import measure_kernel, rewrite_kernel

ELEMENTS_A_PROGRAM = 4096
MOST_ELEMENTS_A_GROUP = 1 << 16
"""Up to this size, one program a group measures and rewrites it in one launch: short inputs wait for launches most."""
NO_STATISTICS = (None, None, None, None)


class Input(NamedTuple):
    """A tensor of 16-bit elements, its statistics, and the distances to its further parts.

    statistics (groups, 2) holds each group's largest magnitude and largest norm of a row, a group being the matrices of
    q that share one of k; it is None for a tensor that was 16-bit to begin with.
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

    sizes, starts: each tensor's elements in the buffer of all parts, and where they begin. measure is None where
    `rewrite_kernel` measures too.
    """

    parts_each: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    groups: int
    measure: Launcher | None
    rewrite: Launcher


_plans: Plans[PartsPlan] = Plans()


def as_inputs(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, arithmetic: Arithmetic) -> Inputs:
    """q, k, v and, unless it is None, dout, each (*leading, rows, width), as the kernels read them."""
    tensors = [q, k, v] if dout is None else [q, k, v, dout]
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    if arithmetic == "half":
        return Inputs(addresses, NO_STATISTICS[: len(tensors)], lambda: [Input(tensor, None, ()) for tensor in tensors])
    metadata = (q.shape, k.shape, v.shape, tuple([tensor.stride() for tensor in tensors]))
    plan = _plans.get((metadata, q.device, arithmetic), lambda: _plan_parts(tensors, arithmetic))
    parts = torch.empty(sum(plan.sizes), dtype=torch.float16, device=q.device)
    shape = (len(tensors), plan.groups, 2)
    allocate = torch.empty if plan.measure is None else torch.zeros
    statistics = allocate(shape, dtype=torch.float32, device=q.device)
    first, first_statistics = parts.data_ptr(), statistics.data_ptr()
    inputs = Inputs(
        tuple([first + 2 * start for start in plan.starts]),
        tuple([first_statistics + 8 * plan.groups * index for index in range(len(tensors))]),
        lambda: _views(tensors, plan, parts, statistics),
    )
    absent = NO_STATISTICS[len(tensors) :]
    sources = (*addresses, *absent, first_statistics)
    if plan.measure is not None:
        plan.measure(sources, lambda: describe_measure(tensors, statistics))
    plan.rewrite(
        (*sources, *inputs.addresses, *absent),
        lambda: describe_rewrite(tensors, statistics, inputs.describe(), plan.measure is None),
    )
    return inputs


def _plan_parts(tensors: list[Tensor], arithmetic: Arithmetic) -> PartsPlan:
    count = 2 if arithmetic == "float32" else 1
    groups = math.prod(tensors[1].shape[:-2])
    sizes = tuple(count * tensor.numel() // tensor.shape[-1] * _row_of_parts(tensor) for tensor in tensors)
    starts = (0, *itertools.accumulate(sizes))[:-1]
    one_program_a_group = max(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS_A_GROUP * groups
    measure = None if one_program_a_group else Launcher(measure_kernel)
    return PartsPlan(count, sizes, starts, groups, measure, Launcher(rewrite_kernel))


def _row_of_parts(tensor: Tensor) -> int:
    """Elements in a row of parts: padded to 32 bytes, so that rows are read in whole vectors."""
    return math.ceil(tensor.shape[-1] / 16) * 16


def _views(tensors: list[Tensor], plan: PartsPlan, parts: Tensor, statistics: Tensor) -> list[Input]:
    """The parts of each tensor, as tensors."""
    views = []
    for tensor, start, size, own in zip(tensors, plan.starts, plan.sizes, statistics, strict=True):
        own_parts = parts[start : start + size].view(plan.parts_each, *tensor.shape[:-1], _row_of_parts(tensor))
        distances = (own_parts.stride(0),) if plan.parts_each == 2 else ()
        views.append(Input(own_parts[0, ..., : tensor.shape[-1]], own, distances))
    return views


def describe_measure(tensors: list[Tensor], statistics: Tensor) -> Launch:
    """The launch of `measure_kernel` on q, k, v and perhaps dout."""
    geometry = Geometry.of(tensors[0], tensors[1], tensors[2], "none")
    missing = 4 - len(tensors)
    strides = [*[tensor.stride() for tensor in tensors], *[(0,) * tensors[0].ndim] * missing]
    tile = _tile(geometry)
    return Launch(
        (_programs(geometry, tile), len(tensors)),
        (*tensors, *[None] * missing, statistics),
        (*geometry.sizes, *strides, geometry.kv_matrices, *geometry.scalars[:3]),
        {**geometry.widths, "TILE": tile},
        {},
    )


def describe_rewrite(tensors: list[Tensor], statistics: Tensor, inputs: list[Input], whole_groups: bool) -> Launch:
    """The launch of `rewrite_kernel` from q, k, v and perhaps dout into ``inputs``."""
    geometry = Geometry.of(tensors[0], tensors[1], tensors[2], "none")
    missing = 4 - len(tensors)
    absent = [(0,) * tensors[0].ndim] * missing
    strides: list[Any] = [*[tensor.stride() for tensor in tensors], *absent]
    strides += [*[x.tensor.stride() for x in inputs], *absent]
    distances = (*[x.distances for x in inputs], *[()] * missing)
    tile = _tile(geometry)
    return Launch(
        (geometry.kv_matrices if whole_groups else _programs(geometry, tile), len(tensors)),
        (*tensors, *[None] * missing, statistics, *[x.tensor for x in inputs], *[None] * missing),
        (*geometry.sizes, *strides, distances, geometry.kv_matrices, *geometry.scalars[:3]),
        {**geometry.widths, "TILE": tile, "WHOLE_GROUPS": whole_groups},
        {"num_warps": 8} if whole_groups else {},
    )


def _tile(geometry: Geometry) -> int:
    return max(16, ELEMENTS_A_PROGRAM // geometry.block)


def _programs(geometry: Geometry, tile: int) -> int:
    group, q_len, k_len, _ = geometry.scalars
    return geometry.kv_matrices * max(group * triton.cdiv(q_len, tile), triton.cdiv(k_len, tile))
