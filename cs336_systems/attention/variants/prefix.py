"""A prefix that every query sees whole (Raffel et al., "T5", 2020): ``prefix(lengths) | causal()`` is a prefix LM."""

import torch
from torch import Tensor

from ..rules import Mask
from .arguments import tensor
from .recorded import INTEGERS, recorded_mask

_prefix = recorded_mask(lambda b, h, q_idx, kv_idx, lengths: kv_idx < lengths[b], (INTEGERS, 1))


def prefix(lengths: Tensor) -> Mask:
    """Every query of entry b of the batch sees the first lengths[b] keys.

    Args:
        lengths: (batch,) or (1,), integers.
    """
    if tensor("lengths", lengths).ndim != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be (batch,) integers; got {tuple(lengths.shape)} {lengths.dtype}")
    return _prefix(lengths)
