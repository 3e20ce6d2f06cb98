"""Caches of keys and values to test attention with, and what its results are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .budget import budget_of, hold
from .evaluation import Features
from .inputs import Inputs


class Cache(NamedTuple):
    """The arguments of `attention_with_cache` that are tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor


def make_cache(
    lengths: Sequence[int],
    *,
    capacity: int,
    q_heads: int,
    kv_heads: int,
    d: int,
    new: int = 1,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Cache:
    """Standard normal tensors. Slots that no sequence has are NaN: looking at one would be seen."""
    shapes = (q_heads, new, d), (kv_heads, capacity, d), (kv_heads, capacity, dv or d)
    q, k, v = (torch.randn(len(lengths), *shape, dtype=dtype, device=device) for shape in shapes)
    for number, length in enumerate(lengths):
        for slots in (k, v):
            slots[number, :, max(0, length) :] = math.nan
    return Cache(q, k, v, torch.tensor(lengths, dtype=torch.long, device=device))


def assert_cached_within_budget(
    out: Tensor,
    lse: Tensor,
    cache: Cache,
    *,
    scale: float | None = None,
    eps: float | None = None,
    features: Features | None = None,
) -> None:
    """Hold ``out`` and ``lse`` of each sequence to the budget of `assert_within_budget`.

    The oracle, naive and the terms are those of causal attention over the sequence's own slots. ``features`` are a
    ``window`` and a ``softcap``, if any.

    Raises AssertionError if one is beyond it; the message names the sequence and lists its results.
    """
    capacity = cache.k.shape[2]
    for number, length in enumerate(cache.lengths.clamp(0, capacity).tolist()):
        one = slice(number, number + 1)
        q, k, v = cache.q[one], cache.k[one, :, :length], cache.v[one, :, :length]
        inputs = Inputs(q, k, v, torch.zeros_like(out[one]), torch.zeros_like(lse[one]))
        held_to = budget_of(inputs, causal=True, scale=scale, features=features)
        message = f"the error of sequence {number}, of {length} slots, is beyond the budget"
        hold({"out": out[one], "lse": lse[one]}, held_to, message, eps=eps)
