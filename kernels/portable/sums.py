"""The gradients of captured tensors: where the passes write them, and what they add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..settings import Settings
from .variation import Differentiated, Variation

AXES_LEFT = {"row": ("batch", "head", "row"), "column": ("batch", "head", "column")}
"""What the sums of each kind still have, in order."""


@dataclass
class Sums:
    """Of one backward call. Each captured tensor has its sums in one of these, by the number of its term.

    by_kind: (batch, heads, length) in float32, for each "row" and "column" term. pairs: the gradient itself.
    """

    variation: Variation
    by_kind: dict[str, dict[int, Tensor]]
    pairs: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, variation: Variation, q: Tensor, k: Tensor) -> Sums:
        """Uninitialised sums for a call with these q and k."""
        heads = q.shape[-3] if q.ndim > 3 else 1
        matrices = math.prod(q.shape[:-2])
        by_kind = {
            kind: {
                term: torch.empty(matrices // heads, heads, length, dtype=torch.float32, device=q.device)
                for term in variation.terms(kind)
            }
            for kind, length in (("row", q.shape[-2]), ("column", k.shape[-2]))
        }
        return cls(variation, by_kind)

    def tensors(self, kind: str) -> tuple[Tensor, ...]:
        """The sums that one pass writes."""
        return tuple(self.by_kind[kind].values())

    def addresses(self, kind: str) -> tuple[int, ...]:
        """Where they are."""
        return tuple([tensor.data_ptr() for tensor in self.by_kind[kind].values()])

    def gradient(self, position: int, tensor: Tensor) -> Tensor:
        """The gradient of the captured tensor at this position among the extras."""
        [term] = [number for number, one in enumerate(self.variation.differentiated) if one.position == position]
        one: Differentiated = self.variation.differentiated[term]
        if one.kind == "pair":
            return self.pairs[term]
        gone = [axis for axis, name in enumerate(AXES_LEFT[one.kind]) if name not in one.axes]
        sums = self.by_kind[one.kind][term]
        return (sums.sum(gone) if gone else sums).reshape(tensor.shape).to(tensor.dtype)


NO_SUMS = Sums(Variation(Settings(), (), (), (), ()), {"row": {}, "column": {}})
"""Those of a call in which no captured tensor needs a gradient."""
