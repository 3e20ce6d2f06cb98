"""Collectives of the default process group that run in the background: each function starts one and returns at once.

What a function returns waits for the result. On a GPU only the stream waits, and the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames both, and warns of the older names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def broadcast(tensors: Iterable[tuple[Tensor, int]]) -> None:
    """Give each tensor, on all processes, the values that it has on the process with this rank; waits for all."""
    started = [dist.broadcast(tensor.detach(), source, async_op=True) for tensor, source in tensors]
    for work in started:
        work.wait()


def start_mean(tensor: Tensor) -> Callable[[], Tensor]:
    """All-reduce: replace a tensor by its mean over the processes."""
    return _mean(tensor, dist.all_reduce(tensor, _sum_or_mean(), async_op=True))


def start_mean_of_part(whole: Tensor) -> Callable[[], Tensor]:
    """Reduce-scatter: this process's part of the mean of a tensor, whose first axis the processes divide evenly."""
    part = whole.new_empty(len(whole) // dist.get_world_size(), *whole.shape[1:])
    return _mean(part, _reduce_scatter(part, whole, _sum_or_mean(), async_op=True))


def start_all_gather(whole: Tensor, part: Tensor) -> Callable[[], None]:
    """All-gather: fill a tensor with the parts of all processes, one after the other along the first axis."""
    work = _all_gather(whole, part, async_op=True)
    return lambda: work.wait()


def _sum_or_mean() -> dist.ReduceOp.RedOpType:
    """NCCL divides while it adds; gloo can only add."""
    return dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM


def _mean(result: Tensor, work: Any) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        work.wait()
        return result if _sum_or_mean() == dist.ReduceOp.AVG else result.div_(dist.get_world_size())

    return finish
