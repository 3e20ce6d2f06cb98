"""Blocks that see nothing but themselves."""

from ..rules import Mask, predicate


@predicate
def _block_local(batch, head, row, column, size):
    return row // size == column // size


def block_local(size: int) -> Mask:
    """Query i sees the keys of its own block of ``size`` positions."""
    if size < 1:
        raise ValueError(f"size must be at least 1; got {size}")
    return _block_local(size)
