"""Keys and values of tokens that went through the model before, so that a new token is all that has to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import Attention, attention, attention_with_cache
from .config import check_size

FEW = 16
"""New tokens that are taken for few: more of them, of sequences of one length, are attended to as in training."""

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values by the number of their layer."""


class KVCache:
    """The keys and values of a batch of sequences in every layer, allocated once.

    Token t of each sequence has slot t, whatever the lengths of the others: sequences begin together and end apart.
    Memory for the whole capacity is taken by the first tokens, in the dtype and on the device of their keys.

    Args:
        batch: how many sequences.
        capacity: the longest of them, in tokens.

    ``layers`` has the keys and values (batch, kv_heads, capacity, d) of every layer that wrote some, by its number.
    What a single further token of each sequence computes depends on the device's own count of tokens, ``filled``, and
    on no number of the host, so it can be recorded in a CUDA graph: see `Decoder`.

    Raises:
        TypeError, ValueError: a size is not a positive int.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        check_size("batch", batch)
        check_size("capacity", capacity)
        self.batch = batch
        self.capacity = capacity
        self.layers: Layers = {}
        self.filled: Int[Tensor, " batch"] = torch.zeros(batch, dtype=torch.long, device="cpu")
        self._lengths: list[int] = [0] * batch
        self._begun = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each sequence has."""
        return tuple(self._lengths)

    def begin(self, new: int, device: torch.device) -> Step:
        """The places of ``new`` further tokens of every sequence, to be written layer by layer.

        Args:
            new: how many.
            device: of the model.

        Raises:
            ValueError: they do not fit in.
        """
        self.reserve(new)
        if self.filled.device != device:
            self.filled = self.filled.to(device)
        start, end = min(self._lengths), max(self._lengths) + new
        rows = torch.arange(self.batch, device=device)[:, None]
        positions = self.filled[:, None] + torch.arange(new, device=device)
        together = end if end == new or (new > FEW and start + new == end) else None
        return Step(self.layers, self.capacity, rows, positions, self.filled + new, together)

    def reserve(self, new: int) -> None:
        """Make sure that ``new`` further tokens of every sequence fit in, and expect them to be counted by `advance`.

        All that `begin` does on the host, for who replays what the device does.

        Raises:
            ValueError: they do not fit in.
        """
        end = max(self._lengths) + new
        if end > self.capacity:
            raise ValueError(f"cache must have room for {end} tokens a sequence; got a capacity of {self.capacity}")
        self._begun = new

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
        # In place: what was recorded reads this tensor.
        if len(set(counts)) == 1:
            self.filled += counts[0]  # nothing is copied to the device
        else:
            self.filled.copy_(torch.tensor(self._lengths))


class Step(NamedTuple):
    """Further tokens on their way through the model.

    Attributes:
        layers: where their keys and values go.
        capacity: of those.
        rows: (batch, 1), the numbers of the sequences.
        positions: (batch, new), of the tokens, which are their slots.
        lengths: (batch,), how many slots each sequence has with them.
        together: one after the last slot, where all sequences end with it and the tokens are many, or the first; then
            attention is that of training. None where the device alone knows where sequences end.
    """

    layers: Layers
    capacity: int
    rows: Int[Tensor, "batch 1"]
    positions: Int[Tensor, "batch new"]
    lengths: Int[Tensor, " batch"]
    together: int | None

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.rows.shape[0]

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
        keys, values = self._write(k, v)
        end = self.step.together
        if end == k.shape[2]:
            return attend(q, k, v)
        window, scale, softcap = attend.window, attend.scale, attend.softcap
        if end is None:
            return attention_with_cache(q, keys, values, self.step.lengths, window=window, scale=scale, softcap=softcap)
        seen = keys[:, :, :end], values[:, :, :end]
        return attention(q, *seen, causal=True, window=window, scale=scale, softcap=softcap)

    def _write(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all slots."""
        if k.requires_grad or v.requires_grad:
            raise ValueError(
                "cache must be used under torch.no_grad(): it keeps no graph; got keys that need gradients"
            )
        step, new = self.step, k.shape[2]
        stored = step.layers.get(self.number)
        if stored is None:
            shape = (*k.shape[:2], step.capacity, k.shape[3])
            # Nobody looks at slots that no token has.
            stored = step.layers[self.number] = k.new_empty(shape), v.new_empty(shape)
        for slots, written in zip(stored, (k, v), strict=True):
            if step.together is not None:
                slots[:, :, step.together - new : step.together] = written
            else:
                slots[step.rows, :, step.positions] = written.transpose(1, 2)
        return stored
