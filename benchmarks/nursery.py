"""Processes that begin with everything imported: each is a fork of one that has imported it and done nothing else."""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

HERE = sys.platform == "linux"
"""Whether processes can be forked: elsewhere systems cannot, or their libraries start threads by themselves."""
_FOR_IMPORTS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}
"""While modules are imported: `torch.cuda.is_available` must not initialise CUDA, which no fork could use then, and
Inductor must not start its processes, with threads of their own, which no fork would have."""


class Nursery:
    """A process that forks others, which run a function of a module.

    It imports the program that this one runs, and modules, at its start: those must start no thread, and initialise no
    GPU. A module that cannot be imported is left to the process that needs it.

    Args:
        modules: names.
        target: what forks run, with their end of a connection.
    """

    def __init__(self, modules: Sequence[str], target: Callable[[Connection], None]) -> None:
        self.modules, self.environment = frozenset(modules), dict(os.environ)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        # Not a daemon, which may have no children: `stop` ends it, and so does the end of this process.
        self._process = context.Process(target=_nurse, args=(theirs, tuple(modules), target))
        self._process.start()
        theirs.close()
        self._count = 0
        self._at_work: set[int] = set()
        self._retired = False

    def serves(self, modules: Sequence[str]) -> bool:
        """Whether it is alive, has imported the modules, and forks have the environment that this process has now."""
        return self._process.is_alive() and self.modules.issuperset(modules) and self.environment == dict(os.environ)

    def fork(self) -> tuple[Connection, Callable[[float], int | None]]:
        """A new process: this end of its connection, and what ends it.

        The latter waits so many seconds for it to end by itself, then kills it, and returns its exit status, None where
        that is not known.
        """
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        number = self._count
        self._count += 1
        self._at_work.add(number)
        self._connection.send((number, None))
        send_handle(self._connection, theirs.fileno(), self._process.pid or 0)
        theirs.close()

        def end(patience: float) -> int | None:
            try:
                self._connection.send((number, patience))
                status: int | None = self._connection.recv()
            except (EOFError, OSError):
                status = None
            self._at_work.discard(number)
            if self._retired:
                self.retire()
            return status

        return ours, end

    def retire(self) -> None:
        """End it when none of its forks is left."""
        self._retired = True
        if not self._at_work:
            self.stop()

    def stop(self) -> None:
        """End it, and all processes that it forked."""
        self._connection.close()
        self._process.join()


_current: Nursery | None = None


def nursery(modules: Sequence[str], target: Callable[[Connection], None]) -> Nursery:
    """This program's, started anew where it does not have the modules, or the environment has changed since.

    What was imported once is imported from then on.
    """
    global _current
    if _current is None or not _current.serves(modules):
        known = [] if _current is None else sorted(_current.modules.difference(modules))
        if _current is not None:
            _current.retire()
        _current = Nursery([*modules, *known], target)
    return _current


def stop() -> None:
    """End this program's nursery, if it has one."""
    global _current
    if _current is not None:
        _current.stop()
    _current = None


# The end of Python waits for the process, so this must come before: what is registered last is called first.
atexit.register(stop)


def _nurse(connection: Connection, modules: Sequence[str], target: Callable[[Connection], None]) -> None:
    """Import, then fork and end processes as asked, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the program, which ends this
    _import(modules)
    context = multiprocessing.get_context("fork")
    children: dict[int, BaseProcess] = {}
    try:
        while True:
            number, patience = connection.recv()
            if patience is None:
                theirs = Connection(recv_handle(connection))
                children[number] = context.Process(target=_begin, args=(connection, theirs, target), daemon=True)
                children[number].start()
                theirs.close()  # so that the end of the process is the end of the connection
            else:
                connection.send(_ended(children.pop(number), patience))
    except EOFError:
        pass
    finally:
        for child in children.values():
            _ended(child, 0.0)


def _import(modules: Sequence[str]) -> None:
    before = dict(os.environ)
    os.environ.update(_FOR_IMPORTS)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    for name in _FOR_IMPORTS.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: before[name] for name in _FOR_IMPORTS.keys() & before.keys()})
    # What is there by now stays: forks need not look through it at each collection, which would copy it, too.
    gc.collect()
    gc.freeze()


def _begin(nurse: Connection, connection: Connection, target: Callable[[Connection], None]) -> None:
    nurse.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target(connection)


def _ended(child: Any, patience: float) -> int | None:
    child.join(patience)
    child.kill()
    child.join()
    status: int | None = child.exitcode
    return status
