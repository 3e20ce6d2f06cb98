"""Cross-entropy of a language model's head, optionally in chunks, so that only some logits are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..ranges import named_range
from .config import check_positive, check_size

IGNORED = -100
"""The target of a token that the loss ignores; torch's default ``ignore_index``."""


def head_cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "batch length d_model"],
    targets: Int[Tensor, "batch length"],
    chunk: int | None = None,
    count: float | None = None,
) -> Float[Tensor, ""]:
    """The mean of -log softmax(head(hidden))[target] over the targets that are not -100.

    Args:
        head: computes logits (tokens, vocab_size) from hidden (tokens, d_model).
        hidden: the output of the last norm.
        targets: the token that follows each position.
        chunk: number of tokens whose logits are in memory at a time; None for all. The backward pass computes the
            logits of each chunk again, one more product with the head's matrix.
        count: divisor of the sum, if it is not the number of these targets: that of a whole step of several
            micro-batches, for example. Without it the loss of no targets is NaN; with it, 0.

    Returns:
        The loss, in float32 (float64 for float64 logits).

    Raises TypeError or ValueError if ``chunk`` is not a positive int, ``count`` is not a positive number, or the shapes
    of hidden and targets differ.
    """
    if count is not None:
        check_positive("count", count)
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets must have shape {tuple(hidden.shape[:-1])}; got {tuple(targets.shape)}")
    if chunk is not None:
        check_size("chunk", chunk)
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    with named_range("head and loss"):
        if chunk is None:
            total = _sum(head, hidden, targets)
        else:
            chunks = zip(hidden.split(chunk), targets.split(chunk), strict=True)
            # The head draws no random numbers, so there is no generator state to restore.
            sums = [checkpoint(_sum, head, *each, use_reentrant=False, preserve_rng_state=False) for each in chunks]
            total = torch.stack(sums).sum()
        return total / ((targets != IGNORED).sum() if count is None else count)


def _sum(head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
