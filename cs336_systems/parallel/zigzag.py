"""Which tokens of a sequence each process has: two chunks, one early and one late.

A sequence is cut into 2n chunks for n processes, and process r has chunks r and 2n - 1 - r. A causal query sees what is
before it, so a late chunk costs more than an early one; the pairs cost the same. (Striped attention, Brandon et al.,
2023, deals out single tokens to the same end; chunks leave the kernels what they are fast at, contiguous queries.)

With 3 processes::

    chunk              0  1  2  3  4  5
    process            0  1  2  2  1  0
    keys that it sees  1  2  3  4  5  6     7 for each process
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from ..transformer.loss import IGNORED


class Share(NamedTuple):
    """The part of a batch of sequences that one process has.

    Attributes:
        tokens: those of its two chunks, one after the other.
        targets: what follows each; -100 where that does not count.
        positions: of the tokens in the whole sequences.
    """

    tokens: Int[Tensor, "batch share"]
    targets: Int[Tensor, "batch share"]
    positions: Int[Tensor, "1 share"]


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The numbers of a process's chunks, the early one first."""
    return rank, 2 * size - 1 - rank


def owners(size: int) -> list[int]:
    """The numbers of all chunks, in the order in which the processes have them: 0, 2n - 1, 1, 2n - 2, ..."""
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size)]


def share_of(tokens: Int[Tensor, "batch length"], targets: Int[Tensor, "batch length"], rank: int, size: int) -> Share:
    """What process number ``rank`` of ``size`` has of sequences.

    A length that 2 · size does not divide is filled up at the end, with targets of -100. That is exact: no token before
    sees what was added, and no loss counts it. The added tokens have the last position, so that none is beyond what a
    model has angles for.

    Raises:
        ValueError: the sequences have fewer tokens than there are chunks.
    """
    length = tokens.shape[1]
    if length < 2 * size:
        raise ValueError(f"tokens must have a length of at least 2 · {size} to be shared by {size}; got {length}")
    chunk = -(-length // (2 * size))
    added = 2 * size * chunk - length
    positions = torch.arange(length + added, device=tokens.device).clamp(max=length - 1)[None]
    filled = (F.pad(tokens, (0, added)), F.pad(targets, (0, added), value=IGNORED), positions)
    early, late = (slice(number * chunk, (number + 1) * chunk) for number in chunks_of(rank, size))
    return Share(*(torch.cat([x[:, early], x[:, late]], dim=1) for x in filled))
