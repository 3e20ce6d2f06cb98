"""Which processes there are, and what each has a part of: torchrun's environment as one value.

Processes are numbered so that those that share a sequence are neighbours, which on one machine, and on machines with
faster links within than between them, are the closest::

    process            0  1  2  3  4  5  6  7
    data               0  0  1  1  2  2  3  3      (8 processes, 2 to a sequence)
    context            0  1  0  1  0  1  0  1
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NONE, DDP, FSDP, CONTEXT, FSDP_CONTEXT = "none", "ddp", "fsdp", "context", "fsdp+context"
MODES = (NONE, DDP, FSDP, CONTEXT, FSDP_CONTEXT)
"""What ``--parallel`` can be."""

WITH_CONTEXT, WITH_SHARDS = (CONTEXT, FSDP_CONTEXT), (FSDP, FSDP_CONTEXT)

T = TypeVar("T")

PATIENCE = timedelta(hours=12)
"""How long processors wait for one another: as long as the first may take to tokenise a text."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run, as one of them sees them.

    Attributes:
        device: where this process computes.
        mode: how they share the work, one of `MODES`; "none" for a process alone.
        rank, size: the number of this process, and how many there are.
        context_size: how many processes share each sequence.
        mesh: all processes in one dimension, "all"; None for a process alone.
        grid: the same in two dimensions, "data" and "context"; None for a process alone.
        hosts: the group of all processes in which processors speak to one another, by gloo.
    """

    device: torch.device
    mode: str = NONE
    rank: int = 0
    size: int = 1
    context_size: int = 1
    mesh: DeviceMesh | None = None
    grid: DeviceMesh | None = None
    hosts: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no group of processes at all."""
        return self.mode == NONE

    @property
    def shards(self) -> int:
        """Into how many parts parameters, gradients and optimizer state are divided."""
        return self.size if self.mode in WITH_SHARDS else 1

    @property
    def data_rank(self) -> int:
        """Which sequences this process has a part of, from 0 up to `data_size`."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """How many groups of processes have sequences of their own."""
        return self.size // self.context_size

    @property
    def context_rank(self) -> int:
        """Which part of its sequences this process has, from 0 up to `context_size`."""
        return self.rank % self.context_size

    @property
    def context_group(self) -> dist.ProcessGroup:
        """Those who share this process's sequences. Raises ValueError for a process alone."""
        if self.grid is None:
            raise ValueError(f"mode must be one with a group of processes; got {self.mode!r}")
        return self.grid.get_group("context")

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, on each of them, in a tensor of its own."""
        if self.is_alone:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def highest(self, number: int) -> int:
        """The highest of the processes' numbers, on each of them. Devices are not waited for."""
        if self.is_alone:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.hosts)
        return int(found)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, which can be pickled, on each of them."""
        if self.is_alone:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.hosts)
        return values

    def together(self, step: Callable[[], T]) -> T:
        """What a step returns in this process; all of them take it, and none waits for one that has failed.

        Raises:
            ValueError, TypeError, OSError: the step raised it in some process; that of the first one, in all of them.
        """
        failure: Exception | None = None
        try:
            result = step()
        except (ValueError, TypeError, OSError) as error:
            failure = error
        for failed in self.gathered(failure):
            if failed is not None:
                raise failed
        return result

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.highest(0)

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """The block, by the main process before the others, who then find what it wrote; also where it raises."""
        if not self.is_main:
            self.barrier()
        try:
            yield
        finally:
            if self.is_main:
                self.barrier()


def launched() -> bool:
    """Whether torchrun, or what sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_main_process() -> bool:
    """Whether this process has number 0, also before there is a layout."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def start(
    mode: str, device: torch.device, context_size: int | None = None, patience: timedelta | None = None
) -> Iterator[Layout]:
    """The layout of this process, and a process group until the block ends; nothing of it for mode "none".

    Args:
        mode: one of `MODES`.
        device: cpu, for gloo, or cuda, for NCCL: then each process takes the GPU of its number on its machine.
        context_size: how many processes share each sequence; None for all of them, where the mode has that.
        patience: how long processes wait for one another; None for torch's own time, and `PATIENCE` for processors.

    Raises:
        ValueError: the mode and how the process was started do not go together, or a size does not divide another.
    """
    size = check(mode, device, context_size)
    if mode == NONE:
        yield Layout(device)
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", _local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=_bound(device), timeout=patience)
    try:
        world, rank = dist.get_world_size(), dist.get_rank()
        grid = (world // size, size)
        yield Layout(
            device,
            mode,
            rank,
            world,
            size,
            mesh=init_device_mesh(device.type, (world,), mesh_dim_names=("all",)),
            grid=init_device_mesh(device.type, grid, mesh_dim_names=("data", "context")),
            hosts=dist.new_group(backend="gloo", timeout=patience or PATIENCE),
        )
    finally:
        dist.destroy_process_group()


def check(mode: str, device: torch.device, context_size: int | None) -> int:
    """How many processes share a sequence. Raises ValueError as `start` does."""
    if mode not in MODES:
        raise ValueError(f"parallel must be one of {', '.join(map(repr, MODES))}; got {mode!r}")
    if context_size is not None and mode not in WITH_CONTEXT:
        raise ValueError(
            f"context_size must be None with parallel {mode!r}, where sequences are whole; got {context_size}"
        )
    if mode == NONE:
        if launched():
            choices = ", ".join(map(repr, MODES[1:]))
            raise ValueError(f"parallel must be one of {choices} under torchrun; got {mode!r}")
        return 1
    if not launched():
        raise ValueError(f"parallel {mode!r} needs torchrun: torchrun --nproc-per-node N -m cs336_systems.training ...")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cuda or cpu with parallel {mode!r}; got {str(device)!r}")
    if str(device) != device.type:
        raise ValueError(f"device must have no number with parallel {mode!r}, torchrun gives each; got {str(device)!r}")
    if device.type == "cuda" and _local_rank() >= torch.cuda.device_count():
        raise ValueError(
            f"--nproc-per-node must be at most the {torch.cuda.device_count()} GPUs of this machine; got process "
            f"{_local_rank()}"
        )
    if mode not in WITH_CONTEXT:
        return 1
    world = int(os.environ["WORLD_SIZE"])
    size = world if context_size is None else context_size
    if size < 1 or world % size:
        raise ValueError(f"context_size must divide the number of processes, {world}; got {size}")
    return size


_groups_on_gpus = itertools.count()


def _bound(device: torch.device) -> torch.device | None:
    """What a group is bound to: its GPU, so that NCCL splits the grid's groups off it; None for gloo.

    A second group of a process is not bound either: up to torch 2.13 splitting it is a segmentation fault
    (pytorch/pytorch#192109).
    """
    return device if device.type == "cuda" and next(_groups_on_gpus) == 0 else None


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
