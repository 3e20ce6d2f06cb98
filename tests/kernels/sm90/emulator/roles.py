"""CTAs and their roles as Python threads, and what they wait at: mbarriers and named barriers."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from .accesses import Accesses, Clock, arrival, enter, here, merge
from .values import value_of

WAIT_SECONDS = 300


class Launch:
    """The roles of all CTAs of a launch, each a thread."""

    def __init__(self) -> None:
        self.changing = threading.RLock()
        self.waiting: dict[int, tuple[Callable[[], bool], threading.Event]] = {}
        self.running = 0
        self.failure: BaseException | None = None
        self.additions = 0

    def start(self, jobs: list[tuple[Callable[[], None], Cta, int]]) -> None:
        """Run jobs, each with its CTA and its number of warps, and return when they have ended."""
        threads = [threading.Thread(target=self._run, args=job) for job in jobs]
        self.running += len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self, job: Callable[[], None], cta: Cta, warps: int) -> None:
        enter(cta, warps, job)
        try:
            with torch.no_grad():
                job()
        except BaseException as failure:
            self.failure = self.failure or failure
        with self.changing:
            self.running -= 1
            self.wake()

    def wait(self, ready: Callable[[], bool]) -> None:
        while True:
            with self.changing:
                if ready():
                    return
                woken = threading.Event()
                self.waiting[threading.get_ident()] = ready, woken
                self.wake()
            if not woken.wait(WAIT_SECONDS) or self.failure is not None:
                raise RuntimeError("a role stopped waiting: another failed")

    def wake(self) -> None:
        """Wake the roles that wait no longer, those alone: there are many. If all wait, the launch has failed."""
        woken = [thread for thread, (ready, _) in self.waiting.items() if ready()]
        if not woken and len(self.waiting) == self.running > 0:
            self.failure = self.failure or RuntimeError("all roles wait")
        for thread in woken if self.failure is None else [*self.waiting]:
            self.waiting.pop(thread)[1].set()


class Cta:
    """A program of a launch: its number, its hardware barriers by number, and accesses of its shared memory."""

    def __init__(self, launch: Launch, number: int, grid: int) -> None:
        self.launch, self.number, self.grid = launch, number, grid
        self.arrived: dict[int, int] = {}
        self.phase: dict[int, int] = {}
        self.told: dict[tuple[int, int], Clock] = {}
        self.accesses = Accesses()


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.told: list[Clock] = [{}, {}]

    def init(self, count):
        self.count = self.pending = count

    def arrive(self, count=1, expected=0, came=0):
        with here.cta.launch.changing:
            self.bytes += expected - came
            self.pending -= count
            # Bytes that come know what the role that asked for them knew.
            merge(self.told[self.phase % 2], arrival() if count > 0 else here.clock)
            assert self.pending >= 0
            if self.pending == 0 and self.bytes == 0:
                self.phase += 1
                self.pending, self.told[self.phase % 2] = self.count, {}
            here.cta.launch.wake()

    def wait(self, parity):
        here.cta.launch.wait(lambda: self.phase % 2 != int(parity))
        merge(here.clock, self.told[int(parity)])


def arrive_at(number: int, threads: int, waits: bool) -> None:
    """PTX's bar.arrive and bar.sync."""
    cta = here.cta
    with cta.launch.changing:
        cta.arrived[number] = cta.arrived.get(number, 0) + 32 * here.warps
        assert cta.arrived[number] <= threads
        phase = cta.phase.setdefault(number, 0)
        merge(cta.told.setdefault((number, phase % 2), {}), arrival())
        if cta.arrived[number] == threads:
            cta.arrived[number], cta.phase[number] = 0, phase + 1
            cta.told[number, (phase + 1) % 2] = {}
        cta.launch.wake()
    if waits:
        cta.launch.wait(lambda: cta.phase[number] > phase)
        merge(here.clock, cta.told[number, phase % 2])


class Barriers:
    """Shared memory of mbarriers."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place):
        return self.all[int(place)]


class Jit:
    """A function of a kernel, or a kernel, which a grid launches."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        functools.update_wrapper(self, function)

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args, **kwargs):
            named = {name: value for name, value in kwargs.items() if name in inspect.signature(self.fn).parameters}
            launch = Launch()
            job = functools.partial(self.fn, *map(value_of, args), **named)
            launch.start([(job, Cta(launch, number, grid[0]), 4) for number in range(grid[0])])

        return run


def jit(function=None, **options):
    return Jit(function) if function is not None else Jit


def warp_specialize(roles, warps, registers):
    cta = here.cta
    jobs = [functools.partial(function, *args) for function, args in roles]
    # The thread that comes here waits for its roles, and is none itself.
    with cta.launch.changing:
        cta.launch.running -= 1
    cta.launch.start(list(zip(jobs, itertools.repeat(cta), [4, *warps], strict=False)))
    with cta.launch.changing:
        cta.launch.running += 1
