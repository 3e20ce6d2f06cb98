"""How large the scores of a call are, which masks, biases and what rules captured have to fit."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """Packed sequences: where those of q and of k begin, (sequences + 1,) each, and how long none of them exceeds."""

    q_starts: Tensor
    k_starts: Tensor
    q_most: int | None
    k_most: int | None


class Sizes(NamedTuple):
    """Of the scores. ``heads`` is None where tensors have no head axis.

    Packed sequences are entries of the batch; lengths that are not known are 1, which is all that tensors may have.
    """

    batch: tuple[int, ...]
    heads: int | None
    q_len: int
    k_len: int
    packed: Packed | None = None

    @property
    def matrices(self) -> int:
        """Of each batch entry: its heads, or 1 where tensors have no head axis."""
        return 1 if self.heads is None else self.heads

    @property
    def shape(self) -> tuple[int, ...]:
        """(*batch, heads, q_len, k_len), as masks and biases broadcast to it."""
        return (*self.batch, *(() if self.heads is None else (self.heads,)), self.q_len, self.k_len)


def shift_of(sizes: Sizes, causal: str) -> int | Tensor:
    """How far the position of query i among the keys is from i: of all sequences, or (sequences,) of each."""
    if causal == "top_left":
        return 0
    if sizes.packed is None:
        return sizes.k_len - sizes.q_len
    return sizes.packed.k_starts.diff() - sizes.packed.q_starts.diff()


def unsaid(sizes: Sizes) -> str:
    """What to add to a message about rows or columns where their number was not said."""
    if sizes.packed is None or None not in sizes.packed[2:]:
        return ""
    return ", without max_seqlen_q and max_seqlen_k, which bound rows and columns"
