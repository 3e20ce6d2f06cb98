"""The gradients of captured tensors: where the passes write them, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def gradient(self, position: int, extras: Sequence[Tensor]) -> Tensor:
        """The gradient of the captured tensor at this position among the extras."""
        tensor = extras[position]
        [term] = [number for number, one in enumerate(self.variation.differentiated) if one.position == position]
        one: Differentiated = self.variation.differentiated[term]
        if one.kind == "pair":
            return self.pairs[term]
        gone = [axis for axis, name in enumerate(AXES_LEFT[one.kind]) if name not in one.axes]
        sums = self.by_kind[one.kind][term]
        packed = self.variation.packed(extras)
        if packed is not None and one.axes & {"batch", one.kind}:
            most = None
            if one.kind in one.axes:
                most = self.variation.sequences(extras)[1 + (one.kind == "column")]
            sums = by_sequence(sums[0], packed[one.kind == "column"], most)
        return (sums.sum(gone) if gone else sums).reshape(tensor.shape).to(tensor.dtype)


def by_sequence(sums: Tensor, starts: Tensor, most: int | None) -> Tensor:
    """Sums (heads, length) of packed sequences, as (sequences, heads, most), or summed up where that is None.

    What does not belong to a sequence, or goes beyond ``most``, is left out. Adds nothing atomically, and asks nothing
    of the device.
    """
    length, count = sums.shape[-1], starts.numel() - 1
    starts = starts.long().clamp(0, length).cummax(0).values
    if most is None:
        ends = torch.cat([starts[:1] * 0, starts[1:]])
        parts = torch.segment_reduce(sums.mT.double().contiguous(), "sum", offsets=ends, axis=0, unsafe=True)
        return parts[..., None].to(sums.dtype)
    place = torch.arange(length, device=sums.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    place = place - torch.where(sequence == 0, 0, starts[sequence])
    spread = sums.new_zeros(count + 1, most, sums.shape[0])
    spread[torch.where(place < most, sequence, count), place.clamp(max=most - 1)] = sums.mT
    return spread[:count].mT


NO_SUMS = Sums(Variation(Settings(), (), (), (), ()), {"row": {}, "column": {}})
"""Those of a call in which no captured tensor needs a gradient."""
