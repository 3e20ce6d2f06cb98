"""Blocks that see nothing but themselves."""

from ..rules import Mask
from .arguments import rows
from .recorded import mask_of_divisor

_block_local = mask_of_divisor(lambda b, h, q_idx, kv_idx, size: q_idx // size == kv_idx // size)


def block_local(size: int) -> Mask:
    """Query i sees the keys of its own block of ``size`` positions."""
    return _block_local(rows("size", size, 1))
