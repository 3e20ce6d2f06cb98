"""Accesses of shared memory that a GPU finishes later than it issues them, and what orders them.

A load is finished when its result is used, a product or a store by TMA when it is waited for. Before that, nothing may
be written there. And products and TMA see what threads have stored only after a fence. A role knows of others what the
barriers say at which it waited for them: each has a vector clock (Mattern, "Virtual Time and Global States of
Distributed Systems", 1989), which counts every role's arrivals that came before.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

here = threading.local()
"""The thread's role: its CTA, its number of warps, its name, its clock, and its products and stores that may run."""

Clock = dict[Any, int]
Span = tuple[int, int]


def enter(cta: Any, warps: int, role: Any) -> None:
    """Begin a role."""
    here.cta, here.warps, here.role, here.clock = cta, warps, role, {role: 0}
    here.products, here.stores = [], []


def arrival() -> Clock:
    """What an arrival of this role tells: what it knows, and all that it has done."""
    told = {**here.clock}
    here.clock[here.role] += 1
    return told


def merge(clock: Clock, other: Clock) -> None:
    """Know what another clock does."""
    for role, count in other.items():
        clock[role] = max(clock.get(role, -1), count)


class Access:
    """Of this role, to memory; it is done, or fenced, between two arrivals."""

    def __init__(self, memory: torch.Tensor) -> None:
        last = sum((size - 1) * step for size, step in zip(memory.shape, memory.stride(), strict=True))
        begin = memory.data_ptr()
        self.role, self.span = here.role, (begin, begin + (last + 1) * memory.element_size())
        self.done_at: int | None = None

    def finish(self) -> None:
        """It is done, or fenced."""
        if self.done_at is None:
            self.done_at = here.clock[here.role]

    @property
    def is_done(self) -> bool:
        """By what this role knows."""
        return self.done_at is not None and (self.role == here.role or self.done_at <= here.clock.get(self.role, -1))


class Loaded:
    """What values of a load refer to until it is used."""

    def __init__(self, load: Access) -> None:
        self.load = load


class Accesses:
    """Those of a CTA: loads, whose results may be gone unused; what products and TMA read; what threads have stored."""

    def __init__(self) -> None:
        self.loads: list[tuple[Access, weakref.ref[Loaded]]] = []
        self.reads: list[Access] = []
        self.stores: list[Access] = []

    def load(self, memory: torch.Tensor) -> Loaded:
        """A thread's load."""
        loaded = Loaded(Access(memory))
        self.loads.append((loaded.load, weakref.ref(loaded)))
        return loaded

    def read(self, memory: torch.Tensor) -> Access:
        """What a product or TMA reads."""
        access = Access(memory)
        assert all(store.is_done for store in _at(self.stores, access.span)), "no fence after what threads have stored"
        self.reads = [x for x in self.reads if x.done_at is None or (x.role, x.span) != (access.role, access.span)]
        self.reads.append(access)
        return access

    def write(self, memory: torch.Tensor, *, by_tma: bool) -> None:
        """What threads or TMA write. Threads' loads and stores keep their order."""
        access = Access(memory)
        reads = _at(self.reads, access.span)
        assert all(read.is_done for read in reads), "written while a product or TMA may read it"
        self.reads = [x for x in self.reads if x not in reads]
        overwritten = [x for x in _at(self.stores, access.span) if by_tma or x.role == access.role]
        self.stores = [x for x in self.stores if x not in overwritten]
        if not by_tma:
            self.stores.append(access)
            return
        at = _at([load for load, _ in self.loads], access.span)
        # What nothing refers to is not loaded.
        loads = [load for load, loaded in self.loads if load in at and (load.done_at is not None or loaded())]
        assert all(load.is_done for load in loads), "TMA overwrites what is still being loaded"
        self.loads = [x for x in self.loads if x[0] not in at]


def _at(accesses: list[Access], span: Span) -> list[Access]:
    return [x for x in accesses if x.span[0] < span[1] and span[0] < x.span[1]]


def is_inside() -> bool:
    """Whether this is a thread of a kernel."""
    return getattr(here, "cta", None) is not None


def load(memory: torch.Tensor) -> Loaded | None:
    """A thread's load; None outside of a kernel."""
    if not is_inside():
        return None
    with here.cta.launch.changing:
        loaded: Loaded = here.cta.accesses.load(memory)
    return loaded


def read(running: list[list[Access]], *memories: torch.Tensor) -> None:
    """An asynchronous operation, one of ``here.products`` or ``here.stores``, which reads memories."""
    with here.cta.launch.changing:
        running.append([here.cta.accesses.read(memory) for memory in memories])


def wait(running: list[list[Access]], left: int) -> None:
    """Wait until no more than ``left`` of them run."""
    while len(running) > left:
        for access in running.pop(0):
            access.finish()


def write(memory: torch.Tensor, *, by_tma: bool) -> None:
    """What threads or TMA write."""
    if is_inside():
        with here.cta.launch.changing:
            here.cta.accesses.write(memory, by_tma=by_tma)


def fence() -> None:
    """This role's loads are done, and products and TMA see what it has stored."""
    with here.cta.launch.changing:
        accesses = here.cta.accesses
        for access in (*[load for load, _ in accesses.loads], *accesses.stores):
            if access.role == here.role:
                access.finish()
