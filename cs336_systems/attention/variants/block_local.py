"""Blocks that see nothing but themselves."""

from ..rules import Mask
from .arguments import rows
from .recorded import recorded_mask

_block_local = recorded_mask(lambda b, h, q_idx, kv_idx, size: q_idx // size == kv_idx // size, int)


def block_local(size: int) -> Mask:
    """Query i sees the keys of its own block of ``size`` positions."""
    return _block_local(rows("size", size, 1))
