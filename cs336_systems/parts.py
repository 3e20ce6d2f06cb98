"""Names for parts of a computation that lie within one module, for whoever asks where in it the time goes.

The formula of attention is one function, and so is the loss of a head. They say which part of them comes next by
``with part("attention: softmax"):``, which does nothing until somebody listens (see `cs336_systems.profiling.regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

Marker = Callable[[str], AbstractContextManager[object]]
"""Makes the range of a part from its name."""

_marker: Marker | None = None


def part(name: str) -> AbstractContextManager[object]:
    """What a part of a computation runs in: nothing, or what a listener marks it with.

    In what torch.compile or torch.export traces it is always nothing: their programs have other parts.
    """
    if torch.compiler.is_compiling() or _marker is None:
        return nullcontext()
    return _marker(name)


@contextmanager
def marked_by(marker: Marker) -> Iterator[None]:
    """Have parts marked, on all threads, until it ends.

    Raises:
        RuntimeError: another listener is there; one range of a part is enough.
    """
    global _marker
    if _marker is not None:
        raise RuntimeError("parts must be marked by one listener at a time; got a second one")
    _marker = marker
    try:
        yield
    finally:
        _marker = None
