"""Blocks that see nothing but themselves."""

from ..rules import Mask, predicate
from .arguments import rows


@predicate
def _block_local(batch, head, row, column, size):
    return row // size == column // size


def block_local(size: int) -> Mask:
    """Query i sees the keys of its own block of ``size`` positions."""
    return _block_local(rows("size", size, 1))
