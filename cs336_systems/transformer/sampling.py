"""Sampling of the next token from logits: greedy, temperature, top-k, and top-p (nucleus)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import check_positive, check_size


@dataclass(frozen=True)
class Sampling:
    """How to sample a token.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens; None for all.
        top_p: sample from the fewest most likely tokens whose probabilities, among those that ``top_k`` keeps, sum to
            at least this (Holtzman et al., 2020). None or 1 for all.

    Raises TypeError or ValueError if an attribute has the wrong type or is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature != 0 or isinstance(self.temperature, bool):
            check_positive("temperature", self.temperature)
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        if self.top_p is not None:
            check_positive("top_p", self.top_p)
            if self.top_p > 1:
                raise ValueError(f"top_p must be at most 1; got {self.top_p}")

    def probabilities(self, logits: Float[Tensor, "batch vocab_size"]) -> Float[Tensor, "batch vocab_size"]:
        """The probability of each token, in float32 or float64; of equal logits the first ranks higher."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature < torch.finfo(torch.float32).tiny:
            # GPUs flush a subnormal divisor to 0.
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Without the maximum, a division by a small temperature would overflow.
        probabilities = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        if self.top_p is not None:
            before = ordered.cumsum(-1) - ordered
            before[:, 0] = 0  # keep the most likely token, however the sums are rounded
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            ordered /= ordered.sum(-1, keepdim=True)
        return torch.zeros_like(ordered).scatter_(-1, order, ordered)

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """Sample a token for each row, without a host synchronisation; ``generator`` must be on the logits' device.

        The first of independent exponential arrivals with rates p is token i with probability p[i]. That is what
        ``torch.multinomial`` computes as well, but it then synchronises to check the probabilities.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)
