"""Cross-entropy of a language model's head, whose logits need not lie in memory all at once."""

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
"""The target of a token that does not count, as torch has it."""


def head_cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "batch length d_model"],
    targets: Int[Tensor, "batch length"],
    chunk: int | None = None,
    count: float | None = None,
) -> Float[Tensor, ""]:
    """The mean of -log softmax(head(hidden))[target] over the targets that are not -100.

    Args:
        head: gives logits (tokens, vocab_size) of hidden (tokens, d_model).
        hidden: what the last norm gave.
        targets: the token that follows each.
        chunk: how many tokens have their logits in memory at a time; None for all. The backward pass computes those
            of each chunk again, which costs one more product with the head's matrix.
        count: what their sum is divided by, in place of how many they are: those of a whole step, of which these are a
            part. Without it the loss of no target at all is NaN; with it, 0.

    Returns:
        The loss, in float32 (float64 for float64 logits).

    Raises:
        TypeError, ValueError: ``chunk`` is not a positive int, ``count`` not a positive number, or the shapes of hidden
            and targets do not fit.
    """
    if count is not None:
        check_positive("count", count)
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets must have shape {tuple(hidden.shape[:-1])}; got {tuple(targets.shape)}")
    if chunk is not None:
        check_size("chunk", chunk)
    with named_range("head and loss"):
        return _mean(head, hidden.flatten(0, -2), targets.flatten(), chunk, count)


def _mean(
    head: Callable[[Tensor], Tensor], rows: Tensor, wanted: Tensor, chunk: int | None, count: float | None
) -> Tensor:
    if chunk is None:
        return _summed(head, rows, wanted) / ((wanted != IGNORED).sum() if count is None else count)
    pieces = zip(rows.split(chunk), wanted.split(chunk), strict=True)
    # Nothing in the head is random, so there is no state of a generator to restore.
    sums = [checkpoint(_summed, head, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(sums).sum() / ((wanted != IGNORED).sum() if count is None else count)


def _summed(head: Callable[[Tensor], Tensor], rows: Tensor, wanted: Tensor) -> Tensor:
    logits = head(rows)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), wanted, ignore_index=IGNORED, reduction="sum")
