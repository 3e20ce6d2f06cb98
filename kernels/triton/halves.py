"""The kernels' inputs: the tensors of a call, or the float16 halves of float32 tensors for the time of the call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..launching import Launch, Launcher
from .problem import Constants, Problem, stride_multiples
from .split_float32 import measure_kernel, split_kernel

TILE_ELEMENTS = 4096
"""Elements that a program measures or splits at a time."""
SHORT_GROUP = 1 << 15
"""Groups of at most this many elements are split in one launch: each program measures its whole group."""
SHORT_TILE_ELEMENTS = 1 << 13
"""Elements of such a program's tile: enough loads in flight to hide their latency."""
SHORT_PROGRAMS = 128
"""Programs that such a launch aims at: about one for each multiprocessor of a large GPU."""
SLOTS = 32
"""Programs that measure a longer group."""


class Input(NamedTuple):
    """A 16-bit tensor, the stats of its groups, and the offset to its low halves.

    stats: (groups, 2) float32, each group's largest magnitude and, for v and dout in the backward, largest norm of a
    row; None for a tensor that was 16-bit to begin with. lo_offset: a tuple of one, or () without low halves.
    """

    tensor: Tensor
    stats: Tensor | None
    lo_offset: tuple[int, ...]


class Memory(NamedTuple):
    """Buffers of one call. halves: of all tensors, float16. stats: of all groups, then what `measure_kernel` stores."""

    halves: Tensor
    stats: Tensor


def inputs_of(tensors: list[Tensor], plan: SplitPlan | None, memory: Memory | None) -> list[Input]:
    """What the kernels read for q, k, v and perhaps dout."""
    if plan is None or memory is None:
        return [Input(tensor, None, ()) for tensor in tensors]
    return plan.inputs(tensors, memory)


class SplitPlan:
    """How float32 q, k, v and perhaps dout are split: everything that follows from their metadata."""

    def __init__(self, tensors: list[Tensor], problem: Problem) -> None:
        count, self.groups = len(tensors), problem.kv_batch_heads
        self.halves_each = 2 if problem.precision == "float32" else 1
        sizes = [self.halves_each * math.prod(x.shape[:-1]) * half_row(x.shape[-1]) for x in tensors]
        *self.starts, self.elements = (0, *itertools.accumulate(sizes))
        largest = max(x.numel() for x in tensors) // max(1, self.groups)
        self.shares = 0
        if largest <= SHORT_GROUP:
            tiles = triton.cdiv(largest, SHORT_TILE_ELEMENTS)
            self.shares = max(1, min(tiles, SHORT_PROGRAMS // max(1, self.groups * count)))
        self.stats_elements = 2 * count * self.groups
        self.partials_elements = 0 if self.shares else self.stats_elements * SLOTS
        self._problem = problem
        self._absent = (None,) * (4 - count)
        self._measure, self._split = Launcher(measure_kernel), Launcher(split_kernel)

    def __call__(self, tensors: list[Tensor]) -> tuple[tuple[Any, ...], Memory]:
        """Split the tensors. Returns the addresses of halves and stats, for the next launch, and their memory."""
        memory = self.new_memory(tensors[0].device)
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        first, stats = memory.halves.data_ptr(), memory.stats.data_ptr()
        halves = tuple([first + 2 * start for start in self.starts])
        partials = None if self.shares else stats + 4 * self.stats_elements
        if partials is not None:
            self._measure((*addresses, *self._absent, partials), self.measure_launch, tensors, memory)
        self._split(
            (*addresses, *self._absent, stats, partials, *halves, *self._absent), self.split_launch, tensors, memory
        )
        return (*halves, *[stats + 8 * self.groups * number for number in range(len(tensors))]), memory

    def new_memory(self, device: torch.device) -> Memory:
        """Uninitialised buffers."""
        return Memory(
            torch.empty(self.elements, dtype=torch.float16, device=device),
            torch.empty(self.stats_elements + self.partials_elements, dtype=torch.float32, device=device),
        )

    def launches(self, tensors: list[Tensor], memory: Memory) -> Iterator[tuple[Any, Launch]]:
        """The kernels that split tensors, with their launches."""
        if self.partials_elements:
            yield measure_kernel, self.measure_launch(tensors, memory)
        yield split_kernel, self.split_launch(tensors, memory)

    def inputs(self, tensors: list[Tensor], memory: Memory) -> list[Input]:
        """The halves as tensors."""
        inputs = []
        stats = memory.stats[: self.stats_elements].view(len(tensors), self.groups, 2)
        for number, (tensor, start) in enumerate(zip(tensors, self.starts, strict=True)):
            shape = (self.halves_each, *tensor.shape[:-1], half_row(tensor.shape[-1]))
            halves = memory.halves[start : start + math.prod(shape)].view(shape)
            lo_offset = (halves.stride(0),) if self.halves_each == 2 else ()
            inputs.append(Input(halves[0, ..., : tensor.shape[-1]], stats[number], lo_offset))
        return inputs

    def measure_launch(self, tensors: list[Tensor], memory: Memory) -> Launch:
        """The launch of `measure_kernel`."""
        problem, strides, multiples = self._problem, *self._strides(tensors)
        return Launch(
            (self.groups * SLOTS, len(tensors)),
            (*tensors, *self._absent, memory.stats[self.stats_elements :]),
            (*problem.sizes, *strides, self.groups, problem.group, problem.q_len, problem.k_len),
            {"C": self._constants(TILE_ELEMENTS), "STRIDE_MULTIPLES": multiples, "SLOTS": SLOTS},
            {},
        )

    def split_launch(self, tensors: list[Tensor], memory: Memory) -> Launch:
        """The launch of `split_kernel`."""
        problem, strides, multiples = self._problem, *self._strides(tensors)
        inputs = self.inputs(tensors, memory)
        missing = len(self._absent)
        constants = self._constants(SHORT_TILE_ELEMENTS if self.shares else TILE_ELEMENTS)
        tile = constants.TILE_Q.value
        most_tiles = max(problem.group * triton.cdiv(problem.q_len, tile), triton.cdiv(problem.k_len, tile))
        stats, partials = memory.stats.split([self.stats_elements, self.partials_elements])
        return Launch(
            (self.groups * (self.shares or most_tiles), len(tensors)),
            (
                *(*tensors, *self._absent, stats, None if self.shares else partials),
                *(*[x.tensor for x in inputs], *self._absent),
            ),
            (
                *(*problem.sizes, *strides, *[x.tensor.stride() for x in inputs], *[(0,) * tensors[0].ndim] * missing),
                (*[x.lo_offset for x in inputs], *[()] * missing),
                *(self.groups, problem.group, problem.q_len, problem.k_len, self.shares),
            ),
            {"C": constants, "STRIDE_MULTIPLES": multiples, "SLOTS": 0 if self.shares else SLOTS},
            {"num_warps": 8 if self.shares else 4},
        )

    def _strides(self, tensors: list[Tensor]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
        strides, multiples = stride_multiples(tensors)
        missing = len(self._absent)
        return strides + [(0,) * tensors[0].ndim] * missing, multiples + (1,) * missing

    def _constants(self, elements: int) -> Constants:
        tile = max(16, elements // self._problem.block)
        return Constants.of(**self._problem.widths, TILE_Q=tile, TILE_K=tile)


def half_row(width: int) -> int:
    """Elements in a row of halves: padded to 32 bytes, so that rows are read in whole vectors."""
    return math.ceil(width / 16) * 16
