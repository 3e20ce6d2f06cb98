"""Keys and values of tokens that went through the model before, so that a new token is all that has to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import Attention, attention
from .config import check_size


class KVCache:
    """The keys and values of a batch of sequences in every layer, allocated once.

    Token t of each sequence has slot t, whatever the lengths of the others: sequences begin together and end apart.
    Memory for the whole capacity is taken by the first tokens, in the dtype and on the device of their keys.

    Args:
        batch: how many sequences.
        capacity: the longest of them, in tokens.

    ``layers`` has the keys and values (batch, kv_heads, capacity, d) of every layer that wrote some, by its number.

    Raises:
        TypeError, ValueError: a size is not a positive int.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        check_size("batch", batch)
        check_size("capacity", capacity)
        self.batch = batch
        self.capacity = capacity
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: list[int] = [0] * batch
        self._begun = 0
        self._on_device: Int[Tensor, " batch"] = torch.zeros(batch, dtype=torch.long, device="cpu")

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has."""
        return tuple(self._lengths)

    def begin(self, new: int, device: torch.device, window: int | None = None) -> Step:
        """The places of ``new`` further tokens of every sequence, to be written layer by layer.

        Args:
            new: how many.
            device: of the model.
            window: how many tokens a query sees, its own among them; None for all before it.

        Raises:
            ValueError: they do not fit in.
        """
        start, end = min(self._lengths), max(self._lengths) + new
        if end > self.capacity:
            raise ValueError(f"cache must have room for {end} tokens a sequence; got a capacity of {self.capacity}")
        self._begun = new
        self._on_device = self._on_device.to(device)
        positions = self._on_device[:, None] + torch.arange(new, device=device)
        # All queries being the last ones of their sequences, attention aligns them by itself.
        mask = None if start + new == end else _visible(positions, end, window)
        return Step(self, positions, start, end, mask)

    def advance(self, counts: list[int]) -> None:
        """Count tokens as seen: those beyond are overwritten by the next ones.

        Args:
            counts: for each sequence, how many of the tokens written last belong to it; the rest is padding.

        Raises:
            ValueError: there is not one count for each sequence, or one is not from 0 to the number of these tokens.
        """
        if len(counts) != self.batch or min(counts) < 0 or max(counts) > self._begun:
            raise ValueError(f"counts must be {self.batch} numbers from 0 to {self._begun}; got {counts}")
        self._begun = 0
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        if len(set(counts)) == 1:
            self._on_device = self._on_device + counts[0]  # nothing is copied to the device
        else:
            self._on_device = torch.tensor(self._lengths).to(self._on_device.device)


class Step(NamedTuple):
    """Further tokens on their way through the model.

    Attributes:
        cache: where they go.
        positions: (batch, new), of the tokens.
        start, end: the first slot that is written, and one after the last.
        mask: (batch, 1, new, end), the slots that each token sees; None where these are the causal ones of the model.
    """

    cache: KVCache
    positions: Int[Tensor, "batch new"]
    start: int
    end: int
    mask: Bool[Tensor, "batch 1 new end"] | None

    def of_layer(self, number: int) -> LayerCache:
        """What one layer is given of it."""
        return LayerCache(self, number)


class LayerCache(NamedTuple):
    """The part of a step that concerns one layer."""

    step: Step
    number: int

    def attend(
        self,
        attend: Attention,
        q: Float[Tensor, "batch q_heads new d"],
        k: Float[Tensor, "batch kv_heads new d"],
        v: Float[Tensor, "batch kv_heads new d"],
    ) -> Float[Tensor, "batch q_heads new d"]:
        """Attention of new tokens over all so far, their own keys and values written first.

        While the cache is empty this is a causal call as in training, and ``attend`` computes it. Later the queries are
        fewer than the keys, mostly a single one, and "auto" chooses what computes that.

        Raises:
            TypeError: ``attend`` is no `Attention`, but what takes its place where processes share sequences.
            ValueError: keys or values need gradients, which would be lost in the cache.
        """
        if not isinstance(attend, Attention):
            raise TypeError(
                f"attend must be an Attention, of whole sequences, with a cache; got {type(attend).__name__}"
            )
        seen_k, seen_v = self._write(k, v)
        step = self.step
        if step.end == k.shape[2]:
            return attend(q, k, v)
        if step.mask is None:
            return attention(q, seen_k, seen_v, causal=True, window=attend.window)
        return attention(q, seen_k, seen_v, mask=step.mask)

    def _write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all so far."""
        if k.requires_grad or v.requires_grad:
            raise ValueError(
                "cache must be used under torch.no_grad(): it keeps no graph; got keys that need gradients"
            )
        step = self.step
        stored = step.cache.layers.get(self.number)
        if stored is None:
            # Zeros, because slots that no token has are multiplied with weights of 0, and NaN · 0 is NaN.
            shape = (*k.shape[:2], step.cache.capacity, k.shape[3])
            stored = step.cache.layers[self.number] = k.new_zeros(shape), v.new_zeros(shape)
        for slots, new in zip(stored, (k, v), strict=True):
            if step.mask is None:
                slots[:, :, step.start : step.end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                slots[rows, :, step.positions] = new.transpose(1, 2)
        keys, values = stored
        return keys[:, :, : step.end], values[:, :, : step.end]


def _visible(positions: Int[Tensor, "batch new"], end: int, window: int | None) -> Bool[Tensor, "batch 1 new end"]:
    """Which slots tokens at these positions see."""
    distance = positions[:, None, :, None] - torch.arange(end, device=positions.device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
