"""The gradients of captured tensors: where the passes write them, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..diagonals import placed, sums_of_bands
from ..places import in_sequences
from ..settings import Settings
from .variation import Differentiated, Variation

AXES_LEFT = {kind: ("batch", "head", kind) for kind in ("row", "column", "distance")}
"""What the sums of each kind still have, in order."""


@dataclass
class Sums:
    """Of one backward call. Each captured tensor has its sums in one of these, by the number of its term.

    by_kind: (batch, heads, length) in float32, for each "row" and "column" term. gathered: for each "pair" term the
    gradient itself, for each "distance" term (batch, heads, bands, 2, size) in float32, two sums for each diagonal of
    tiles, as `diagonals` takes them. shape: (batch, heads, q_len, k_len); of packed sequences, which stand for a batch,
    the lengths that none exceeds.
    """

    variation: Variation
    by_kind: dict[str, dict[int, Tensor]]
    shape: tuple[int, int, int, int]
    gathered: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, variation: Variation, q: Tensor, k: Tensor, extras: Sequence[Tensor]) -> Sums:
        """Uninitialised sums for a call with these q, k and extras."""
        heads = q.shape[-3] if q.ndim > 3 else 1
        matrices = math.prod(q.shape[:-2])
        shape = (matrices // heads, heads, q.shape[-2], k.shape[-2])
        by_kind = {
            kind: {
                term: torch.empty(matrices // heads, heads, length, dtype=torch.float32, device=q.device)
                for term in variation.terms(kind)
            }
            for kind, length in (("row", q.shape[-2]), ("column", k.shape[-2]))
        }
        sequences, *most = variation.sequences(extras)
        return cls(variation, by_kind, (sequences, heads, most[0], most[1]) if sequences else shape)

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
            bands = sum(-(-length // size) for length in self.shape[2:]) - 1
            shape = (*self.shape[:2], bands, 2, size)
            self.gathered[term] = torch.empty(shape, dtype=torch.float32, device=tensor.device)
        return self.gathered[term]

    def gradient(self, position: int, extras: Sequence[Tensor]) -> Tensor:
        """The gradient of the captured tensor at this position among the extras."""
        tensor = extras[position]
        [term] = [number for number, one in enumerate(self.variation.differentiated) if one.position == position]
        one: Differentiated = self.variation.differentiated[term]
        if one.kind == "pair":
            return self.gathered[term]
        if one.kind == "distance":
            sums = sums_of_bands(self.gathered[term], *self.shape[2:])
        else:
            sums = self.by_kind[one.kind][term]
        gone = [axis for axis, name in enumerate(AXES_LEFT[one.kind]) if name not in one.axes]
        packed = self.variation.packed(extras)
        if packed is not None and one.kind != "distance" and one.axes & {"batch", one.kind}:
            most = self.shape[2 + (one.kind == "column")] if one.kind in one.axes else None
            sums = by_sequence(sums[0], packed[one.kind == "column"], most)
        sums = sums.sum(gone, keepdim=True) if gone else sums
        if one.kind == "distance":
            sums = placed(sums, one.origin, self.shape[2], tensor.shape[-1])
        return sums.reshape(tensor.shape).to(tensor.dtype)


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
    sequence, place = in_sequences(starts, torch.arange(length, device=sums.device))
    spread = sums.new_zeros(count + 1, most, sums.shape[0])
    spread[torch.where(place < most, sequence, count), place.clamp(max=most - 1)] = sums.mT
    return spread[:count].mT


NO_SUMS = Sums(Variation(Settings(), (), (), (), ()), {"row": {}, "column": {}}, (0, 0, 0, 0))
"""Those of a call in which no captured tensor needs a gradient."""
