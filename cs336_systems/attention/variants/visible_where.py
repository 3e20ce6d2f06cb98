"""A mask that is a tensor: of any shape that broadcasts, such as that of padded keys."""

import torch
from torch import Tensor

from ..rules import Mask
from .arguments import tensor
from .recorded import recorded_mask

_visible_where = recorded_mask(lambda b, h, q_idx, kv_idx, mask: mask[b, h, q_idx, kv_idx], (torch.bool, 4))


def visible_where(mask: Tensor) -> Mask:
    """Query i sees key j where the mask (batch or 1, heads or 1, q_len or 1, k_len or 1) is not 0."""
    if tensor("mask", mask).ndim != 4:
        raise ValueError(f"mask must have 4 dimensions (batch, heads, q_len, k_len); got {tuple(mask.shape)}")
    return _visible_where(mask)
