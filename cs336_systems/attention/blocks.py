"""Which blocks of pairs a mask leaves anything of: found once, so that kernels skip the rest and mask the edges."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.settings import BLOCK
from .pairs import Extras, Pairs, seen_pairs
from .spec import AttentionSpec

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
"""Of a block: no pair is visible, some are, all are."""


class Blocks(NamedTuple):
    """The visible blocks, `BLOCK` rows by `BLOCK` columns, of a mask, a causal mask and a window together.

    rows: (batch or 1, heads or 1, blocks of rows, 2 + blocks of columns) int32: for each block of rows how many blocks
    of columns are partly and how many are wholly visible, then their numbers, the partly visible first. columns: the
    same with rows and columns exchanged. The rest is what they were found for.
    """

    rows: Tensor
    columns: Tensor
    q_len: int
    k_len: int
    causal: str
    window: tuple[int | None, int | None]


def find_blocks(
    spec: AttentionSpec,
    tensors: tuple[Tensor, ...],
    batch: int,
    heads: int,
    q_len: int,
    k_len: int,
    device: torch.device,
) -> Blocks:
    """The blocks of a spec's mask, whose rules captured ``tensors``, found a row of blocks at a time."""
    band, extras = spec.band(q_len, k_len), Extras(None, None, None, tensors, ())
    found = []
    for start in range(0, q_len, BLOCK):
        row = torch.arange(start, min(start + BLOCK, q_len), device=device)[:, None]
        pairs = Pairs(
            torch.arange(batch, device=device).view(-1, 1, 1, 1),
            torch.arange(heads, device=device).view(-1, 1, 1),
            row,
            torch.arange(k_len, device=device),
            heads,
        )
        seen = seen_pairs(spec, pairs, band, extras)
        assert seen is not None
        seen = seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, len(row), k_len)))
        some = F.pad(seen.any(-2), (0, -k_len % BLOCK)).unflatten(-1, (-1, BLOCK)).any(-1)
        every = F.pad(seen.all(-2), (0, -k_len % BLOCK)).unflatten(-1, (-1, BLOCK)).all(-1)
        found.append(some.to(torch.int32) + every.to(torch.int32))
    kinds = torch.stack(found, -2)
    return Blocks(_listed(kinds), _listed(kinds.mT), q_len, k_len, spec.causal.value, spec.window)


def _listed(kinds: Tensor) -> Tensor:
    order = torch.where(kinds == PARTIAL, 0, torch.where(kinds == WHOLE, 1, 2)).argsort(dim=-1, stable=True)
    counts = [(kinds == kind).sum(-1, keepdim=True) for kind in (PARTIAL, WHOLE)]
    return torch.cat([*counts, order], -1).to(torch.int32).contiguous()
