"""Run a function in a separate process, so that a crash, a hang or a broken GPU ends that process alone.

On Linux each process is forked by multiprocessing's fork server, which has imported torch and this project and has
never used a GPU, so that it starts within milliseconds. Elsewhere each process is spawned. A process has the
environment variables of its parent at the time it starts, but what the fork server imported has read those of the
first call. It ends when its parent ends, however that happens.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

_EXIT_SECONDS = 5.0
# While the fork server imports modules: torch.cuda.is_available() must not initialise CUDA, which no fork could use
# afterwards, and Inductor must not start worker threads, which no fork would have.
_FOR_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}

OnStep = Callable[[str, str], None]


@dataclass(frozen=True)
class Finished:
    """The end of an isolated call: its result, or why it has none, and the provider of the last `step` it reported."""

    result: Any = None
    failure: str = ""
    provider: str = ""


_to_parent: Connection | None = None


def step(text: str, provider: str = "") -> None:
    """Report to the parent process what this process does next; without a parent that listens, do nothing.

    If the process then crashes or runs out of time, the failure names this step, and ``provider`` is excluded from
    the next attempt (see `harness.run_excluding`).
    """
    if _to_parent is not None:
        _to_parent.send(("step", provider, text))


def finish(result: Any) -> NoReturn:
    """Make this the result of the isolated call, and end its process at once, whatever still runs in it.

    Raises RuntimeError in a process that is none of an isolated call.
    """
    if _to_parent is None:
        raise RuntimeError("finish() must be called within an isolated call; this process has no parent that listens")
    _to_parent.send(("result", result, ""))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_isolated(function: Callable[..., Any], *arguments: Any, **how: Any) -> Finished:
    """Call ``function(*arguments)`` in a new process and wait for it: `map_isolated` of one job."""
    return next(map_isolated(function, [arguments], **how))[1]


def map_isolated(
    function: Callable[..., Any],
    jobs: Iterable[tuple[Any, ...]],
    *,
    processes: int = 1,
    limit: float = math.inf,
    preload: Sequence[str] = (),
    on_step: OnStep = lambda provider, text: None,
) -> Generator[tuple[tuple[Any, ...], Finished], None, None]:
    """Call ``function(*job)`` for each job in a new process; yield (job, `Finished`) as the calls end.

    A call has a failure if the function raises, if its process ends early, or if it exceeds the limit. When the caller
    stops iterating, running calls are killed.

    Args:
        function: importable by its module and name; arguments and result must be picklable.
        jobs: the arguments of each call.
        processes: how many run at a time.
        limit: seconds for a call, the start of its process included; after that the process is killed.
        preload: modules that the fork server imports besides those of this project that this process has. Only the
            first call of a program decides.
        on_step: called with each `step` of the function.
    """
    context = _context(tuple(preload))
    waiting, running = deque(jobs), dict[Connection, _Call]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                call = _Call(context, function, waiting.popleft(), limit)
                running[call.connection] = call
            remaining = max(0.0, min(call.deadline for call in running.values()) - time.monotonic())
            ready = wait(list(running), None if remaining == math.inf else remaining)
            for connection, call in list(running.items()):
                finished = None
                if connection in ready:
                    finished = call.receive(on_step)
                elif time.monotonic() >= call.deadline:
                    finished = call.failed(f"took longer than {limit:g} s")
                if finished is not None:
                    del running[connection]
                    call.close(0.0 if finished.failure else _EXIT_SECONDS)
                    yield call.job, finished
    finally:
        for call in running.values():
            call.close(0.0)


class _Call:
    """A call in its process."""

    def __init__(self, context: Any, function: Callable[..., Any], job: tuple[Any, ...], limit: float) -> None:
        self.job, self.deadline = job, time.monotonic() + limit
        self.provider, self.step = "", "start"
        self.connection, theirs = context.Pipe()
        arguments = (theirs, dict(os.environ), function, job)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def receive(self, on_step: OnStep) -> Finished | None:
        """Take one message; the end of the call, or None after a step."""
        try:
            kind, first, second = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_EXIT_SECONDS)
            return self.failed(f"the process {_end_of(self._process.exitcode)}")
        if kind == "step":
            self.provider, self.step = first, second
            on_step(first, second)
            return None
        return Finished(first, second, self.provider)

    def failed(self, reason: str) -> Finished:
        """The end of a call without a result."""
        where = f"{self.provider} {self.step}".strip()
        return Finished(None, f"{reason}, at: {where}", self.provider)

    def close(self, patience: float) -> None:
        """Kill the process unless it exits within ``patience`` seconds."""
        self.connection.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()


def _end_of(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was killed by {name}" + (", as Linux does when memory runs out" if name == "SIGKILL" else "")


@functools.cache
def _context(preload: tuple[str, ...]) -> Any:
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("benchmarks", "cs336_systems"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", *ours, *preload])
    before = dict(os.environ)
    # The server of Python 3.11 and older does not take over sys.path.
    os.environ.update(_FOR_IMPORTS, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        _set_environment(before)
    return context


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _work(
    connection: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    global _to_parent
    _set_environment(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _to_parent = connection
    try:
        answer = ("result", function(*arguments), "")
    except Exception as error:
        answer = ("result", None, f"{type(error).__name__}: {' '.join(str(error).split())}")
    with contextlib.suppress(BrokenPipeError):
        connection.send(answer)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def termination_as_interruption() -> Iterator[None]:
    """Handle SIGTERM, which `timeout` sends, as Ctrl-C is handled."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set signal handlers
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
