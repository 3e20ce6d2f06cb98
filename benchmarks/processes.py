"""Jobs in processes of their own, which may fail, hang, or end their process without taking anything else with them."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

Job = TypeVar("Job")


@dataclass(frozen=True)
class Finished(Generic[Job]):
    """A job that is over: what its function returned, or why it returned nothing."""

    job: Job
    result: Any = None
    failure: str = ""


class _Worker(Generic[Job]):
    """A process, the job it has, and when that began."""

    def __init__(self, function: Callable[[Job], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(function, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        self.job: Job | None = None
        self.began = 0.0

    def give(self, job: Job) -> None:
        self.job, self.began = job, time.monotonic()
        self.connection.send(job)

    def end(self) -> int | None:
        """Kill the process, if it is still there; its exit status."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        return self._process.exitcode


def _serve(function: Callable[[Any], Any], connection: Connection) -> None:
    try:
        while True:
            job = connection.recv()
            try:
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
) -> Iterator[Finished[Job]]:
    """Run a module's function on each job in so many processes, and yield what becomes of each as it is over.

    An exception, a crash, or taking longer than `seconds_each` is the failure of that job alone; its process makes room
    for a fresh one. At `deadline` (by `time.monotonic`) everything stops, and jobs that are not over are not yielded. A
    job's time includes the start of its process. `function` and the jobs must be importable and picklable.
    """
    waiting = deque(jobs)
    workers: list[_Worker[Job]] = []
    try:
        while waiting or any(worker.job is not None for worker in workers):
            for worker in workers:
                if worker.job is None and waiting:
                    worker.give(waiting.popleft())
            while waiting and len(workers) < processes:
                workers.append(_Worker(function))
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
                        worker.end()
                        workers.remove(worker)
                    worker.job = None
                    yield finished
    finally:
        for worker in workers:
            worker.end()


def _collect(worker: _Worker[Job], seconds_each: float, *, arrived: bool) -> Finished[Job]:
    assert worker.job is not None
    if not arrived:
        return Finished(worker.job, failure=f"took longer than {seconds_each:g} s")
    try:
        result, failure = worker.connection.recv()
    except (EOFError, OSError):
        return Finished(worker.job, failure=f"ended its process, with status {worker.end()}")
    return Finished(worker.job, result, failure)
