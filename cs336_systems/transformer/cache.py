"""The KV cache: keys and values of the tokens processed so far, in every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..attention import Attention, attention, attention_with_cache
from .config import check_size

MAX_DECODE_TOKENS = 16
"""Largest number of new tokens per sequence that always goes through `attention_with_cache`."""

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values by layer index."""


class KVCache:
    """Keys and values of a batch of sequences in every layer, allocated once.

    Slot t of a sequence holds its token t, so the last slots of shorter sequences are unused. The first tokens allocate
    the memory for the whole capacity, with the dtype and on the device of their keys.

    Args:
        batch: number of sequences.
        capacity: maximum length of a sequence, in tokens.

    Attributes:
        layers: by layer index, keys and values (batch, kv_heads, capacity, d).
        device_lengths: (batch,) lengths of the sequences, on the model's device. A step of one token per sequence reads
            lengths from here alone, so a CUDA graph can replay it (see `Decoder`).

    Raises TypeError or ValueError if a size is not a positive int.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        check_size("batch", batch)
        check_size("capacity", capacity)
        self.batch = batch
        self.capacity = capacity
        self.layers: Layers = {}
        self.device_lengths: Int[Tensor, " batch"] = torch.zeros(batch, dtype=torch.long, device="cpu")
        self._lengths = [0] * batch
        self._new = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in each sequence."""
        return tuple(self._lengths)

    def begin(self, new: int, device: torch.device) -> Step:
        """The slots of the next ``new`` tokens of every sequence, for a model on ``device``.

        Raises ValueError if the tokens exceed the capacity.
        """
        self.reserve(new)
        if self.device_lengths.device != device:
            self.device_lengths = self.device_lengths.to(device)
        start, end = min(self._lengths), max(self._lengths) + new
        rows = torch.arange(self.batch, device=device)[:, None]
        positions = self.device_lengths[:, None] + torch.arange(new, device=device)
        first_or_long = end == new or (new > MAX_DECODE_TOKENS and start + new == end)
        return Step(
            self.layers, self.capacity, rows, positions, self.device_lengths + new, end if first_or_long else None
        )

    def reserve(self, new: int) -> None:
        """Raise ValueError unless ``new`` tokens of every sequence fit; `advance` then counts them.

        This is all that `begin` does on the host, for replaying a CUDA graph.
        """
        end = max(self._lengths) + new
        if end > self.capacity:
            raise ValueError(f"cache must have a capacity of at least {end} tokens per sequence; got {self.capacity}")
        self._new = new

    def advance(self, counts: list[int]) -> None:
        """Keep the first ``counts[i]`` new tokens of sequence i; the next tokens overwrite the others (padding).

        Raises ValueError if there is not one count for each sequence, or a count is not from 0 to the number of new
        tokens.
        """
        if len(counts) != self.batch or min(counts) < 0 or max(counts) > self._new:
            raise ValueError(f"counts must be {self.batch} numbers from 0 to {self._new}; got {counts}")
        self._new = 0
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        # In place: a captured graph reads this tensor.
        if len(set(counts)) == 1:
            self.device_lengths += counts[0]  # copies nothing to the device
        else:
            self.device_lengths.copy_(torch.tensor(self._lengths))


class Step(NamedTuple):
    """The slots of new tokens in a cache.

    Attributes:
        layers, capacity: of the cache.
        rows: (batch, 1) indices of the sequences.
        positions: (batch, new) slots of the tokens, which are their positions.
        lengths: (batch,) lengths of the sequences with these tokens.
        end: the length of all sequences with these tokens, if they are the first tokens or many tokens of sequences of
            one length: `attention` then computes the step. None if `attention_with_cache` does.
        layer: index of the layer that `attend` is for.
    """

    layers: Layers
    capacity: int
    rows: Int[Tensor, "batch 1"]
    positions: Int[Tensor, "batch new"]
    lengths: Int[Tensor, " batch"]
    end: int | None
    layer: int = 0

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.rows.shape[0]

    def attend(
        self,
        attend: Attention,
        q: Float[Tensor, "batch q_heads new d"],
        k: Float[Tensor, "batch kv_heads new d"],
        v: Float[Tensor, "batch kv_heads new d"],
    ) -> Float[Tensor, "batch q_heads new d"]:
        """Store k and v, and attend with q to all keys so far.

        If the cache was empty, ``attend`` computes a causal call. Otherwise "auto" chooses the implementation.

        Raises:
            TypeError: ``attend`` is not an `Attention`, as in context parallelism.
            ValueError: k or v requires gradients, which the cache would lose.
        """
        if not isinstance(attend, Attention):
            raise TypeError(f"attend must be an Attention, to use a cache; got {type(attend).__name__}")
        keys, values = self._store(k, v)
        end = self.end
        if end == k.shape[2]:
            return attend(q, k, v)
        window, scale, softcap = attend.window, attend.scale, attend.softcap
        if end is None:
            return attention_with_cache(q, keys, values, self.lengths, window=window, scale=scale, softcap=softcap)
        keys, values = keys[:, :, :end], values[:, :, :end]
        return attention(q, keys, values, causal=True, window=window, scale=scale, softcap=softcap)

    def _store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values to their slots, and return the tensors of all slots."""
        if k.requires_grad or v.requires_grad:
            raise ValueError("cache must be used under torch.no_grad(); got keys or values that require gradients")
        new = k.shape[2]
        if self.layer not in self.layers:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self.layers[self.layer] = k.new_empty(shape), v.new_empty(shape)
        stored = self.layers[self.layer]
        for slots, written in zip(stored, (k, v), strict=True):
            if self.end is not None:
                slots[:, :, self.end - new : self.end] = written
            else:
                slots[self.rows, :, self.positions] = written.transpose(1, 2)
        return stored
