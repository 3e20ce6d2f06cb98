"""From logits to the next token: greedy, by temperature, among the k likeliest, or within a nucleus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import check_positive, check_size


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: how many of the likeliest tokens may be drawn; None for all.
        top_p: the least probability that those which may be drawn have together; the fewest that have it are kept
            (Holtzman et al., 2020). It is a probability of what ``top_k`` leaves. None, as 1, for all.

    Raises:
        TypeError, ValueError: an attribute is out of range, or of another type.
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
        """With which each token is drawn, in float32 or finer; of equal logits the first token counts as likelier."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature < torch.finfo(torch.float32).tiny:
            # Too small to divide by on a GPU, where it is taken for 0.
            return torch.zeros_like(wide).scatter_(-1, wide.argmax(-1, keepdim=True), 1.0)
        # Less the largest, so that dividing by a small temperature makes no infinity.
        probabilities = ((wide - wide.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is None and self.top_p is None:
            return probabilities
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[:, self.top_k :] = 0
            ordered /= ordered.sum(-1, keepdim=True)
        if self.top_p is not None:
            before = ordered.cumsum(-1) - ordered
            # The likeliest is kept whatever rounding makes of the sums.
            before[:, 0] = 0
            ordered = ordered.masked_fill(before >= self.top_p, 0)
            ordered /= ordered.sum(-1, keepdim=True)
        return torch.zeros_like(ordered).scatter_(-1, order, ordered)

    def draw(
        self, logits: Float[Tensor, "batch vocab_size"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " batch"]:
        """A token for each row of logits; ``generator`` must be on their device, which nothing waits for.

        Of exponentially distributed times with the probabilities as their rates, each is the first with its
        probability. ``torch.multinomial`` draws so too, and then asks the device whether all probabilities were valid.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)
