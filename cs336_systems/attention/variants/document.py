"""Several documents in one row: each query sees the keys of its own document alone."""

import torch
from torch import Tensor

from ..rules import Mask
from .arguments import tensor
from .recorded import INTEGERS, recorded_mask

_document = recorded_mask(
    lambda b, h, q_idx, kv_idx, of_queries, of_keys: of_queries[b, q_idx] == of_keys[b, kv_idx],
    (INTEGERS, 2),
    (INTEGERS, 2),
)


def document(of_queries: Tensor, of_keys: Tensor | None = None) -> Mask:
    """Query i sees key j where both have the same number.

    Args:
        of_queries: (batch or 1, q_len), the number of each query's document.
        of_keys: (batch or 1, k_len), that of each key's; as ``of_queries`` if None.
    """
    of_keys = of_queries if of_keys is None else of_keys
    for name, ids in (("of_queries", of_queries), ("of_keys", of_keys)):
        if tensor(name, ids).ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be (batch, length) integers; got {tuple(ids.shape)} {ids.dtype}")
    return _document(of_queries, of_keys)
