"""The processes of a run: torchrun's environment as one value, and what they communicate on the host.

Processes that share a sequence have consecutive ranks, so that they are on one machine where possible::

    rank               0  1  2  3  4  5  6  7
    data_rank          0  0  1  1  2  2  3  3      (8 processes, context_size 2)
    context_rank       0  1  0  1  0  1  0  1
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
"""How processes share the work of a step; docs/scaling.md compares them."""
WITH_CONTEXT, WITH_SHARDS = (CONTEXT, FSDP_CONTEXT), (FSDP, FSDP_CONTEXT)

T = TypeVar("T")

HOST_TIMEOUT = timedelta(hours=12)
"""Of communication between hosts: the first process can tokenize text for hours."""


@dataclass(frozen=True)
class Layout:
    """The processes of a run, from the view of one of them.

    Attributes:
        device: of this process.
        mode: how processes share the work, one of `MODES`; "none" without a process group.
        rank, size: rank of this process, and number of processes.
        context_size: number of processes that share each sequence.
        mesh: all processes in one dimension, "all"; None without a process group.
        grid: the same in two dimensions, "data" and "context".
        host_group: the gloo group of all processes, for communication between hosts.
    """

    device: torch.device
    mode: str = NONE
    rank: int = 0
    size: int = 1
    context_size: int = 1
    mesh: DeviceMesh | None = None
    grid: DeviceMesh | None = None
    host_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0, which writes and prints."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group."""
        return self.mode != NONE

    @property
    def data_rank(self) -> int:
        """Index of this process's sequences, below `data_size`."""
        return self.rank // self.context_size

    @property
    def data_size(self) -> int:
        """Number of groups of processes with different sequences."""
        return self.size // self.context_size

    @property
    def context_rank(self) -> int:
        """Rank among the processes that share a sequence."""
        return self.rank % self.context_size

    @property
    def context_group(self) -> dist.ProcessGroup:
        """The group of processes that share this process's sequences. Raises ValueError without a process group."""
        if self.grid is None:
            raise ValueError(f"mode must be one with a process group; got {self.mode!r}")
        return self.grid.get_group("context")

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all processes, as a new tensor."""
        if self.is_distributed:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def all_reduce_max(self, number: int) -> int:
        """The largest of the processes' numbers, by the hosts alone: no device is synchronised."""
        if not self.is_distributed:
            return number
        largest = torch.tensor(number)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host_group)
        return int(largest)

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all processes, which must be picklable."""
        if not self.is_distributed:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def raise_together(self, function: Callable[[], T]) -> T:
        """Call a function, which must not communicate; if it fails in one process, all of them raise its exception.

        The exception is the ValueError, TypeError or OSError of the first process that raised one.
        """
        failure: Exception | None = None
        try:
            result = function()
        except (ValueError, TypeError, OSError) as error:
            failure = error
        for failed in self.all_gather(failure):
            if failed is not None:
                raise failed
        return result


@contextlib.contextmanager
def start(
    mode: str, device: torch.device, context_size: int | None = None, timeout: timedelta | None = None
) -> Iterator[Layout]:
    """The layout of this process, with a process group within the block; without one for mode "none".

    Args:
        mode: one of `MODES`.
        device: cpu, for gloo, or cuda, for NCCL: each process uses the GPU of its local rank.
        context_size: number of processes that share each sequence; None for all, in modes with context parallelism.
        timeout: of communication; None for torch's default, and `HOST_TIMEOUT` between hosts.

    Raises ValueError if the mode does not fit how the process was started, or a size does not divide another.
    """
    size = check(mode, device, context_size)
    if mode == NONE:
        yield Layout(device)
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        device = torch.device("cuda", _local_rank())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=_bound_device(device), timeout=timeout)
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
            host_group=dist.new_group(backend="gloo", timeout=timeout or HOST_TIMEOUT),
        )
    finally:
        dist.destroy_process_group()


def check(mode: str, device: torch.device, context_size: int | None) -> int:
    """The number of processes that share a sequence. Raises ValueError as `start` does."""
    launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if mode not in MODES:
        raise ValueError(f"parallel must be one of {', '.join(map(repr, MODES))}; got {mode!r}")
    if context_size is not None and mode not in WITH_CONTEXT:
        raise ValueError(f"context_size must be None with parallel {mode!r}; got {context_size}")
    if mode == NONE and launched:
        raise ValueError(f"parallel must be one of {', '.join(map(repr, MODES[1:]))} under torchrun; got {mode!r}")
    if mode == NONE:
        return 1
    if not launched:
        raise ValueError(f"parallel {mode!r} needs torchrun: torchrun --nproc-per-node N -m cs336_systems.training ...")
    if str(device) not in ("cpu", "cuda"):  # torchrun numbers the GPUs
        raise ValueError(f"device must be 'cuda' or 'cpu' with parallel {mode!r}; got {str(device)!r}")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and _local_rank() >= gpus:
        raise ValueError(f"--nproc-per-node must be at most the {gpus} GPUs; got local rank {_local_rank()}")
    if mode not in WITH_CONTEXT:
        return 1
    world = int(os.environ["WORLD_SIZE"])
    size = world if context_size is None else context_size
    if size < 1 or world % size:
        raise ValueError(f"context_size must divide the number of processes, {world}; got {size}")
    return size


_gpu_groups = itertools.count()


def _bound_device(device: torch.device) -> torch.device | None:
    """The GPU to which a process group is bound, so that NCCL splits the groups of the grid from it; None for gloo.

    Only the first group of a process is bound: up to torch 2.13, splitting a second one is a segmentation fault
    (pytorch/pytorch#192109).
    """
    return device if device.type == "cuda" and next(_gpu_groups) == 0 else None


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
