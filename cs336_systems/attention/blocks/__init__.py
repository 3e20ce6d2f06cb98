"""Lists of the blocks of pairs that a mask leaves anything of."""

from .lists import HIDDEN, PARTIAL, WHOLE, Blocks, dense_mask, find_blocks

__all__ = ["HIDDEN", "PARTIAL", "WHOLE", "Blocks", "dense_mask", "find_blocks"]
