"""The gradients of captured tensors: where the passes write them, and what they add up to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..diagonals import placed, sums_of_bands
from ..rules import AXES
from ..settings import Settings
from .variation import Differentiated, Variation

AXES_LEFT = {"row": ("batch", "head", "row"), "column": ("batch", "head", "column")}
"""What the sums of each kind still have, in order."""


@dataclass
class Sums:
    """Of one backward call. Each captured tensor has its sums in one of these, by the number of its term.

    by_kind: (batch, heads, length) in float32, for each "row" and "column" term. gathered: for each "pair" term the
    gradient itself, for each "distance" term (batch or 1, heads or 1, bands, size, size) in float32, a tile for each
    diagonal of tiles. shape: (batch, heads, q_len, k_len).
    """

    variation: Variation
    by_kind: dict[str, dict[int, Tensor]]
    shape: tuple[int, int, int, int]
    gathered: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, variation: Variation, q: Tensor, k: Tensor) -> Sums:
        """Uninitialised sums for a call with these q and k."""
        heads = q.shape[-3] if q.ndim > 3 else 1
        matrices = math.prod(q.shape[:-2])
        shape = (matrices // heads, heads, q.shape[-2], k.shape[-2])
        by_kind = {
            kind: {
                term: torch.empty(*shape[:2], length, dtype=torch.float32, device=q.device)
                for term in variation.terms(kind)
            }
            for kind, length in (("row", q.shape[-2]), ("column", k.shape[-2]))
        }
        return cls(variation, by_kind, shape)

    def tensors(self, kind: str) -> tuple[Tensor, ...]:
        """The sums that one pass writes."""
        return tuple(self.by_kind[kind].values())

    def addresses(self, kind: str) -> tuple[int, ...]:
        """Where they are."""
        return tuple([tensor.data_ptr() for tensor in self.by_kind[kind].values()])

    def target(self, term: int, tensor: Tensor, size: int) -> Tensor:
        """What the pass of its own of a term writes, for a captured tensor; a band's tiles are ``size`` wide."""
        one = self.variation.differentiated[term]
        if one.kind == "pair":
            self.gathered[term] = torch.empty_like(tensor)
        else:
            leading = [full if name in one.axes else 1 for name, full in zip(AXES, self.shape[:2], strict=False)]
            bands = sum(-(-length // size) for length in self.shape[2:]) - 1
            self.gathered[term] = torch.empty(*leading, bands, size, size, dtype=torch.float32, device=tensor.device)
        return self.gathered[term]

    def gradient(self, position: int, tensor: Tensor) -> Tensor:
        """The gradient of the captured tensor at this position among the extras."""
        [term] = [number for number, one in enumerate(self.variation.differentiated) if one.position == position]
        one: Differentiated = self.variation.differentiated[term]
        if one.kind == "pair":
            return self.gathered[term]
        if one.kind == "distance":
            q_len, k_len = self.shape[2:]
            sums = sums_of_bands(self.gathered[term], q_len, k_len)
            return placed(sums, one.origin, q_len, tensor.shape[-1]).reshape(tensor.shape).to(tensor.dtype)
        gone = [axis for axis, name in enumerate(AXES_LEFT[one.kind]) if name not in one.axes]
        sums = self.by_kind[one.kind][term]
        return (sums.sum(gone) if gone else sums).reshape(tensor.shape).to(tensor.dtype)


NO_SUMS = Sums(Variation(Settings(), (), (), (), ()), {"row": {}, "column": {}}, (0, 0, 0, 0))
"""Those of a call in which no captured tensor needs a gradient."""
