"""The sizes of the scores of a call, which masks, biases and captured tensors have to fit."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Packed(NamedTuple):
    """Packed sequences: cu_seqlens of q and of k, (sequences + 1,) each, and bounds on the lengths."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Sizes(NamedTuple):
    """(*batch, heads, q_len, k_len). ``heads`` is None for tensors without a head axis.

    Packed sequences are the batch. Their lengths are max_seqlen_q and max_seqlen_k, or 1 if these are not given: then
    no tensor may have an axis of rows or columns.
    """

    batch: tuple[int, ...]
    heads: int | None
    q_len: int
    k_len: int
    packed: Packed | None = None

    @property
    def num_heads(self) -> int:
        """Heads, 1 for tensors without a head axis."""
        return 1 if self.heads is None else self.heads

    @property
    def shape(self) -> tuple[int, ...]:
        """What masks and biases broadcast to."""
        return (*self.batch, *(() if self.heads is None else (self.heads,)), self.q_len, self.k_len)

    @property
    def note(self) -> str:
        """What to add to a message about rows or columns where their number was not given."""
        if self.packed is None or None not in self.packed[2:]:
            return ""
        return ", without max_seqlen_q and max_seqlen_k, which bound rows and columns"


def diagonal_shift(sizes: Sizes, bottom_right: bool) -> int | Tensor:
    """The position of query 0 among the keys; (sequences,) of them for packed sequences."""
    if not bottom_right:
        return 0
    if sizes.packed is None:
        return sizes.k_len - sizes.q_len
    return sizes.packed.cu_seqlens_k.diff() - sizes.packed.cu_seqlens_q.diff()
