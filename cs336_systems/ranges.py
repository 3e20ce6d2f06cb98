"""Named ranges inside one function, such as the scores and the softmax of attention, for profilers.

``with named_range("attention: softmax"):`` does nothing unless `ranges_opened_by` has installed a function that opens
ranges, as `cs336_systems.profiling.ModuleRanges` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

OpenRange = Callable[[str], AbstractContextManager[object]]
"""Opens a range with a name for the duration of a ``with`` block."""

_open_range: OpenRange | None = None


def named_range(name: str) -> AbstractContextManager[object]:
    """A range around the block. It does nothing by default, and in code that torch.compile or torch.export traces."""
    if torch.compiler.is_compiling() or _open_range is None:
        return nullcontext()
    return _open_range(name)


@contextmanager
def ranges_opened_by(open_range: OpenRange) -> Iterator[None]:
    """Inside the block, `named_range` calls ``open_range``, on all threads.

    Raises:
        RuntimeError: another function is installed already.
    """
    global _open_range
    if _open_range is not None:
        raise RuntimeError("named ranges are already being recorded; leave that block first")
    _open_range = open_range
    try:
        yield
    finally:
        _open_range = None
