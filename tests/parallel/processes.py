"""Runs a function in several processes, in the environment that torchrun sets."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import multiprocessing

from benchmarks.lib.process_groups import free_ports
from cs336_systems.parallel import Layout, start

MOST_GROUPS = 12
"""Process groups that a function can start, one after the other, each with its own port."""

_ports: Iterator[int]


def spawn(function: Callable[..., None], count: int, *arguments: object) -> None:
    """Call ``function(*arguments)`` in each of ``count`` processes; what one raises is raised here.

    They are forks of a process that has imported torch, which takes seconds, and has begun nothing.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "cs336_systems.training"])
    given = function, count, free_ports(MOST_GROUPS), arguments
    multiprocessing.start_processes(_begin, given, nprocs=count, start_method="forkserver")


def _begin(rank: int, function: Callable[..., None], count: int, ports: list[int], arguments: tuple[object]) -> None:
    global _ports
    _ports = iter(ports)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    if "TRITON_INTERPRET" in os.environ and importlib.util.find_spec("triton"):
        from tests.interpreter import make_faster

        make_faster()
    # Like pytest, except for torch's own deprecations.
    warnings.simplefilter("error", FutureWarning)
    function(*arguments)


@contextlib.contextmanager
def layout_of(mode: str, device: str, context_size: int | None = None) -> Iterator[Layout]:
    """`start`, in functions that `spawn` calls."""
    os.environ["MASTER_PORT"] = str(next(_ports))
    with start(mode, torch.device(device), context_size) as layout:
        yield layout
