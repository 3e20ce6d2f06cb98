"""A mask that is a tensor: of any shape that broadcasts, such as that of padded keys."""

from torch import Tensor

from ...kernels.language import at
from ..rules import Mask, predicate
from .arguments import tensor


@predicate
def _visible_where(batch, head, row, column, mask):
    return at(mask, (batch, head, row, column)) != 0


_visible_where.reads("mask", axes="batch head row column")


def visible_where(mask: Tensor) -> Mask:
    """Query i sees key j where the mask (batch or 1, heads or 1, q_len or 1, k_len or 1) is not 0."""
    if tensor("mask", mask).ndim != 4:
        raise ValueError(f"mask must have 4 dimensions (batch, heads, q_len, k_len); got {tuple(mask.shape)}")
    return _visible_where(mask)
