"""Several documents in one row: each query sees the keys of its own document alone."""

import torch
from torch import Tensor

from ...kernels.language import at
from ..rules import Mask, predicate
from .arguments import tensor


@predicate
def _document(batch, head, row, column, of_queries, of_keys):
    return at(of_queries, (batch, row)) == at(of_keys, (batch, column))


_document.reads("of_queries", axes="batch row")
_document.reads("of_keys", axes="batch column")


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
