"""Which tokens each step sees: a function of the seed and of the number of the step alone.

An epoch cuts the tokens into windows that do not overlap, beginning at an offset of its own, and visits each once in a
random order. Epochs follow one another without a gap: sequence number n of a run is window n mod W of epoch n // W,
where W is the number of windows. So a run is continued by a counter, and the sequences of a step are the same however
many processes share them.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int
from torch import Tensor

from .corpus import Tokens

_ORDER, _OFFSET = 0, 1
"""What is drawn of a seed and an epoch; each has a stream of its own."""


class Windows:
    """Tokens as sequences of one length, each with the tokens that follow its own.

    Args:
        tokens: all of them.
        context_length: of a sequence, in tokens.
        seed: of the order.

    Raises:
        ValueError: there are fewer tokens than one sequence takes: twice its length, of which the offset is a part.
    """

    def __init__(self, tokens: Tokens, context_length: int, seed: int) -> None:
        self.tokens = tokens
        self.context_length = context_length
        self.seed = seed
        # Wherever an epoch begins, from 0 up to the length, and with the target of the last token.
        self.count = (len(tokens) - context_length) // context_length
        if self.count < 1:
            raise ValueError(
                f"data must have at least {2 * context_length} tokens to train on, twice the context length; got "
                f"{len(tokens)}: give more text, or a smaller context_length"
            )
        # A step can reach into the next epoch, and its orders are expensive to draw for each sequence.
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)

    def starts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Where the sequences numbered from `first` of a run begin among the tokens."""
        numbers = np.arange(first, first + count)
        epochs, places = numbers // self.count, numbers % self.count
        starts = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            starts[mine] = self.offset(int(epoch)) + self._order(int(epoch))[places[mine]] * self.context_length
        return starts

    def batch(
        self, step: int, batch_size: int, micro_batch: int, part: int, rank: int = 0, world_size: int = 1
    ) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
        """The tokens of a part of a step, and what follows each; int64, on the CPU.

        Args:
            step: of the optimizer, from 0 on.
            batch_size: sequences in a step, over all parts and processes.
            micro_batch: sequences in a part of one process.
            part: from 0 up to batch_size / (micro_batch · world_size).
            rank, world_size: the number of this process, and how many there are.

        Raises:
            ValueError: the sequences of a step are not so many parts of each process, or there is no such part.
        """
        if batch_size % (micro_batch * world_size):
            raise ValueError(
                f"batch_size must be a multiple of micro_batch × world_size, {micro_batch} × {world_size}; got "
                f"{batch_size}"
            )
        if not (0 <= rank < world_size and 0 <= part < batch_size // (micro_batch * world_size)):
            raise ValueError(f"rank and part must be within the step; got rank {rank}, part {part}")
        first = step * batch_size + (part * world_size + rank) * micro_batch
        return gather(self.tokens, self.starts(first, micro_batch), self.context_length)

    def offset(self, epoch: int) -> int:
        """Where the first window of an epoch begins."""
        return int(np.random.default_rng((self.seed, epoch, _OFFSET)).integers(self.context_length))

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch, _ORDER)).permutation(self.count)


def gather(
    tokens: Tokens, starts: npt.NDArray[np.int64], length: int
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """The sequences that begin at `starts`, and what follows each of their tokens."""
    rows = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
    both = torch.from_numpy(rows)
    return both[:, :-1], both[:, 1:]


def split(tokens: Tokens, fraction: float) -> tuple[Tokens, Tokens]:
    """The tokens to train on, and the last `fraction` of them, to validate on."""
    kept = len(tokens) - int(len(tokens) * fraction)
    return tokens[:kept], tokens[kept:]


def validation_starts(tokens: Tokens, length: int, most: int) -> npt.NDArray[np.int64]:
    """Where the sequences to validate on begin: at most so many windows, spread evenly, the same every time.

    Raises:
        ValueError: there are too few tokens for one.
    """
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"the text to validate on must have more tokens than the context length, {length}; got {len(tokens)}: "
            "give more text, a larger val_fraction, or val_fraction 0 for no validation"
        )
    return np.linspace(0, count - 1, min(most, count)).round().astype(np.int64) * length
