"""How sequences are divided in context parallelism: each process has one early chunk and one late chunk.

A sequence is cut into 2n chunks for n processes, and process r has chunks r and 2n - 1 - r. A causal query attends to
all keys before it, so that late chunks cost more; the pairs cost the same. Striped Attention (Brandon et al., 2023)
balances single tokens instead; chunks keep queries contiguous.

With 3 processes::

    chunk              0  1  2  3  4  5
    process            0  1  2  2  1  0
    chunks of keys     1  2  3  4  5  6     7 for each process
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from ..transformer.loss import IGNORED


class Shard(NamedTuple):
    """One process's tokens of a batch of sequences.

    Attributes:
        tokens: of its two chunks, concatenated.
        targets: the next token of each; -100 where it does not count.
        positions: of the tokens in the full sequences.
    """

    tokens: Int[Tensor, "batch shard"]
    targets: Int[Tensor, "batch shard"]
    positions: Int[Tensor, "1 shard"]


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The indices of a process's chunks, the early one first."""
    return rank, 2 * size - 1 - rank


def gathered_order(size: int) -> list[int]:
    """The indices of all chunks in the order of the processes: 0, 2n - 1, 1, 2n - 2, ..."""
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size)]


def zigzag_shard(
    tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], rank: int, size: int
) -> Shard:
    """The shard of process ``rank`` of ``size``.

    A length that is not a multiple of 2 · size is padded at the end, with targets of -100. This is exact: no token
    attends to the padding, and no loss counts it. Padding has the last position, for which the model has RoPE angles.

    Raises ValueError if the sequences have fewer tokens than there are chunks.
    """
    length = tokens.shape[1]
    if length < 2 * size:
        raise ValueError(f"tokens must have a length of at least 2 · {size} for {size} processes; got {length}")
    chunk = -(-length // (2 * size))
    padding = 2 * size * chunk - length
    positions = torch.arange(length + padding, device=tokens.device).clamp(max=length - 1)[None]
    padded = (F.pad(tokens, (0, padding)), F.pad(targets, (0, padding), value=IGNORED), positions)
    early, late = (slice(index * chunk, (index + 1) * chunk) for index in chunks_of(rank, size))
    return Shard(*(torch.cat([x[:, early], x[:, late]], dim=1) for x in padded))
