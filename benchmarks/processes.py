"""Jobs in processes of their own, which may fail, hang, or end their process without taking anything else with them.

On Linux each process is a fork of one that has imported what jobs need and has never touched a GPU (`nursery`), so that
it begins within milliseconds; elsewhere it is started from nothing, and imports for itself. Guaranteed either way: a
process has the environment (`os.environ`) that the caller has when it starts, for what libraries read when they are
imported (OMP_NUM_THREADS, TRITON_INTERPRET) as for what they read later (CUDA_VISIBLE_DEVICES, PYTORCH_ALLOC_CONF):
where the environment has changed since everything was imported, everything is imported anew.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from benchmarks import nursery

Job = TypeVar("Job")

_SECONDS_TO_END = 5.0
"""For a process that has nothing left to do, to give back what it holds: semaphores, processes of its own."""


@dataclass(frozen=True)
class Finished(Generic[Job]):
    """A job that is over: what its function returned, or why it returned nothing."""

    job: Job
    result: Any = None
    failure: str = ""


class _Worker(Generic[Job]):
    """A process, the job it has, and when that began."""

    def __init__(self, function: Callable[[Job], Any], modules: Sequence[str]) -> None:
        self.connection, self._end = (
            nursery.nursery(modules, _serve).fork() if nursery.HERE else _started_from_nothing()
        )
        self._function = function
        self._status: int | None = None
        self._ended = False
        self.job: Job | None = None
        self.began = 0.0

    def give(self, job: Job) -> None:
        self.job, self.began = job, time.monotonic()
        with suppress(BrokenPipeError, ConnectionResetError):  # the end of the process is found where answers are
            self.connection.send((self._function, job))

    def end(self, patience: float) -> int | None:
        """Let the process end, which has nothing to do, and kill it after so many seconds; its exit status."""
        if not self._ended:
            self.connection.close()
            self._status, self._ended = self._end(patience), True
        return self._status


def _started_from_nothing() -> tuple[Connection, Callable[[float], int | None]]:
    """As `nursery.Nursery.fork`, where that cannot be."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the connection

    def end(patience: float) -> int | None:
        process.join(patience)
        process.kill()
        process.join()
        return process.exitcode

    return ours, end


def _serve(connection: Connection) -> None:
    try:
        while True:
            packed = connection.recv_bytes()
            try:
                function, job = pickle.loads(packed)
                answer = (function(job), "")
            except Exception as error:
                answer = (None, f"{type(error).__name__}: {error}")
            connection.send(answer)
            if answer[1]:
                return  # whatever it broke, a GPU's context perhaps, goes with this process
    except (EOFError, KeyboardInterrupt):
        pass


def run_jobs(
    function: Callable[[Job], Any],
    jobs: Sequence[Job],
    *,
    processes: int,
    seconds_each: float,
    deadline: float = float("inf"),
    preload: Sequence[str] = (),
) -> Iterator[Finished[Job]]:
    """Run a module's function on each job in so many processes, and yield what becomes of each as it is over.

    An exception, a crash, or taking longer than `seconds_each` is the failure of that job alone; its process makes room
    for a fresh one. At `deadline` (by `time.monotonic`) everything stops, and jobs that are not over are not yielded. A
    job's time includes the start of its process. `function` and the jobs must be importable and picklable. `preload`
    names modules that jobs will import, beside that of `function`: they must not use a GPU, or start threads, for that.
    """
    modules = (module_of(function), *preload)
    waiting = deque(jobs)
    workers: list[_Worker[Job]] = []
    try:
        while waiting or any(worker.job is not None for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft())
            while waiting and len(workers) < processes:
                workers.append(_Worker(function, modules))
                workers[-1].give(waiting.popleft())
            busy = [worker for worker in workers if worker.job is not None]
            until = min(deadline, *(worker.began + seconds_each for worker in busy))
            ready = wait([worker.connection for worker in busy], max(0.0, until - time.monotonic()))
            if time.monotonic() >= deadline:
                return
            for worker in busy:
                late = time.monotonic() - worker.began > seconds_each
                if worker.connection in ready or late:
                    finished = _collect(worker, seconds_each, arrived=worker.connection in ready)
                    if finished.failure:
                        worker.end(0.0 if late else _SECONDS_TO_END)
                        workers.remove(worker)
                    worker.job = None
                    yield finished
    finally:
        for worker in workers:
            worker.connection.close()  # all of them at once, so that none waits for another
        for worker in workers:
            worker.end(_SECONDS_TO_END if worker.job is None else 0.0)


def module_of(function: Callable[..., Any]) -> str:
    """The name of the module that a function, or a partial call of one, is from."""
    return module_of(function.func) if isinstance(function, functools.partial) else function.__module__


def _collect(worker: _Worker[Job], seconds_each: float, *, arrived: bool) -> Finished[Job]:
    assert worker.job is not None
    if not arrived:
        return Finished(worker.job, failure=f"took longer than {seconds_each:g} s")
    try:
        result, failure = worker.connection.recv()
    except (EOFError, OSError):
        return Finished(worker.job, failure=f"ended its process, with status {worker.end(_SECONDS_TO_END)}")
    return Finished(worker.job, result, failure)
