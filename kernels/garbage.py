"""Pausing Python's search for reference cycles."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_threads: dict[object, int] = {}
"""The thread of each block in which collections are paused."""
_was_enabled = False
"""Whether collections were enabled before the first of these blocks."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable Python's garbage collector inside the block, in all threads.

    A collection takes measurable time, also while Triton compiles, and frees tensors in reference cycles, which makes
    memory figures too small. Blocks may overlap: the end of the last one restores what the first one found.
    """
    global _was_enabled
    block = object()
    with _lock:
        if not _threads:
            _was_enabled = gc.isenabled()
        _threads[block] = threading.get_ident()
        gc.disable()
    try:
        yield
    finally:
        _end([block])


def _end(blocks: list[object]) -> None:
    with _lock:
        for block in blocks:
            del _threads[block]
        if blocks and not _threads and _was_enabled:
            gc.enable()


def _end_those_of_other_threads() -> None:
    """In a forked process, whose only thread is the one that forked."""
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    _end([block for block, thread in _threads.items() if thread != threading.get_ident()])


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_end_those_of_other_threads)
