"""What the argument ``impl`` names."""

from __future__ import annotations

import enum


class Implementation(str, enum.Enum):
    """What ``impl`` names."""

    FLASH = "flash"
    SDPA = "sdpa"
    COMPILED = "compiled"
    TILED = "tiled"
    NAIVE = "naive"


# A tuple, because torch.compile cannot iterate over an enum.
NAMES = ("auto", *(implementation.value for implementation in Implementation))


def parse(impl: str | Implementation) -> Implementation | None:
    """The implementation that was named; None for "auto"."""
    if isinstance(impl, Implementation):
        return impl  # making a member of another is more than torch.compile of torch 2.11 can trace
    expected = ", ".join(map(repr, NAMES))
    if not isinstance(impl, str):
        raise TypeError(f"impl must be one of {expected}; got {impl!r} of type {type(impl).__name__}")
    if impl not in NAMES:
        raise ValueError(f"impl must be one of {expected}; got {impl!r}")
    return None if impl == "auto" else Implementation(impl)
