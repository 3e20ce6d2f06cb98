"""What each process of a group does that times all-reduces, for all_reduce.py."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.lib.harness import Case, Row
from benchmarks.lib.process_groups import time_together
from benchmarks.lib.steps import step_columns
from cs336_systems.parallel import Layout
from cs336_systems.profiling.timing import RoundTimes

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""By the type of the device."""
MEGABYTE = 10**6
_BYTES = 4
_BLOCK = 2**20
_CHECKED = 1000
_MORE_THAN_ANY_CACHE = 256 * 2**20


@dataclass(frozen=True)
class AllReduceCase(Case):
    """The sum of a float32 tensor over processes, in place.

    Attributes:
        backend: of `BACKENDS`.
        megabytes: of the tensor; a megabyte is 10⁶ bytes.
        warmup_steps: all-reduces before those that are timed.
    """

    backend: str
    processes: int
    megabytes: float
    warmup_steps: int

    @property
    def elements(self) -> int:
        """Of the tensor, at least one."""
        return max(1, round(self.megabytes * MEGABYTE / _BYTES))

    @property
    def bytes(self) -> int:
        """Of the tensor."""
        return _BYTES * self.elements

    @property
    def name(self) -> str:
        """The case in one line."""
        return f"{self.backend} {self.megabytes:g} MB on {self.processes} warmup={self.warmup_steps}"


def measure(case: AllReduceCase, options: Namespace, layout: Layout) -> Row:
    """The columns of the case, from what all processes measured; each process calls this.

    Raises RuntimeError if a sum is wrong.
    """
    tensor = values(case.elements, layout.device, options.seed)
    ends = tensor[:_CHECKED].clone(), tensor[-_CHECKED:].clone()
    tensor *= layout.rank + 1
    dist.all_reduce(tensor)
    check_sums(tensor, ends, layout.size)
    times = time_together(
        {"all_reduce": lambda: dist.all_reduce(tensor)},
        layout,
        steps=options.steps,
        most_steps=options.most_steps,
        warmup=case.warmup_steps,
        between=make_ready(tensor, layout),
    )
    return {"dtype": "float32"} | step_columns(times.step) | bandwidth_columns(case.bytes, layout.size, times.step)


def values(elements: int, device: torch.device, seed: int) -> Tensor:
    """A tensor (elements,) of normal random numbers, the same on all processes; they repeat, to be made in no time."""
    block = torch.randn(min(elements, _BLOCK), generator=torch.Generator().manual_seed(seed)).to(device)
    return block.repeat(-(-elements // len(block)))[:elements].clone()


def check_sums(tensor: Tensor, ends: tuple[Tensor, Tensor], processes: int) -> None:
    """Raise RuntimeError unless the tensor's ends are those before, times 1 + 2 + ... + processes."""
    total = processes * (processes + 1) / 2
    for found, before in zip((tensor[: len(ends[0])], tensor[-len(ends[1]) :]), ends, strict=True):
        expected = total * before
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            worst = float((found - expected).abs().max())
            raise RuntimeError(f"an all-reduce must return the sum over all processes; it differs by {worst:g}")


def make_ready(tensor: Tensor, layout: Layout) -> Callable[[], None]:
    """What comes before each all-reduce, untimed: values that do not grow, and processes that begin together.

    GPUs wait for one another in an all-reduce of one number, and the hosts go on: a barrier would let the GPU wait for
    the host, which takes about as long to launch an all-reduce as a small one takes. Before it the L2 cache is
    overwritten.
    """
    on_gpu = layout.device.type == "cuda"
    one = tensor.new_zeros(1)
    cache = torch.empty(_MORE_THAN_ANY_CACHE, dtype=torch.int8, device=layout.device) if on_gpu else None

    def ready() -> None:
        tensor.div_(layout.size)  # so that the next sum is the last one
        if cache is None:
            dist.barrier()
        else:
            cache.zero_()
            dist.all_reduce(one)

    return ready


def bandwidth_columns(size: int, processes: int, times: RoundTimes) -> Row:
    """Algorithm bandwidth, bytes over time, and bus bandwidth, in GB/s of 10⁹ bytes, with their intervals.

    Bus bandwidth is that of nccl-tests: algorithm bandwidth times 2 (n - 1) / n, the bytes that each process must send
    for each byte of the tensor. It does not depend on the number of processes if links are what limits.
    """
    low, high = times.interval
    row: Row = {}
    for end, milliseconds in (("", times.median), ("_low", high), ("_high", low)):
        rate = size / milliseconds * 1e-6
        row |= {f"algorithm_gb_s{end}": rate, f"bus_gb_s{end}": rate * 2 * (processes - 1) / processes}
    return row
