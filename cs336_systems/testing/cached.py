"""Caches of keys and values to test attention with, and what its results are held to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .budget import compare
from .inputs import Inputs
from .oracle import naive_results, oracle
from .terms import roundings, terms


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
    batch, on = len(lengths), {"dtype": dtype, "device": device}
    q = torch.randn(batch, q_heads, new, d, **on)  # type: ignore[call-overload]
    k, v = (torch.randn(batch, kv_heads, capacity, width, **on) for width in (d, dv or d))  # type: ignore[call-overload]
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
    features: Mapping[str, Any] | None = None,
) -> None:
    """Hold ``out`` and ``lse`` of each sequence to the budget of `assert_within_budget`.

    The oracle, naive and the terms are those of causal attention over the sequence's own slots. ``features`` are a
    ``window`` and a ``softcap``, if any.

    Raises:
        AssertionError: one is beyond it; the message names the sequence and lists its results.
    """
    capacity = cache.k.shape[2]
    for number, length in enumerate(cache.lengths.clamp(0, capacity).tolist()):
        one = slice(number, number + 1)
        q, k, v = cache.q[one], cache.k[one, :, :length], cache.v[one, :, :length]
        inputs = Inputs(q, k, v, torch.zeros_like(out[one]), torch.zeros_like(lse[one]))
        settings: dict[str, Any] = {"causal": True, "scale": scale, "features": features}
        actual = {"out": out[one], "lse": lse[one]}
        exact, naive, *sizes = (make(inputs, **settings) for make in (oracle, naive_results, terms, roundings))
        findings = compare(actual, exact, {name: naive[name] for name in actual}, *sizes, eps=eps)
        if not all(finding.holds for finding in findings):
            said = f"the error of sequence {number}, of {length} slots, is beyond the budget"
            raise AssertionError("\n".join([said, *map(str, findings)]))
