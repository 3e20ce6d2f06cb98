"""Packed sequences and KV caches: their inputs, and the budget of results, from each sequence by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .budget import Budget, budget_of, hold
from .evaluation import Features, Results
from .inputs import Inputs

Lengths = Sequence[tuple[int, int]]
"""How many queries and keys each sequence has."""


def starts_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """``cu_seqlens`` of sequences of these lengths: int32, one more than there are."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def make_packed(
    lengths: Lengths,
    *,
    heads: tuple[int, int] = (2, 1),
    d: int = 8,
    dv: int | None = None,
    beyond: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Inputs:
    """Random q (all_q, q_heads, d), k, v, dout, and dlse (q_heads, all_q); ``beyond`` rows belong to no sequence."""
    q_rows, k_rows = (sum(column) + beyond for column in zip(*lengths, strict=True))
    dv = d if dv is None else dv
    shapes = (q_rows, heads[0], d), (k_rows, heads[1], d), (k_rows, heads[1], dv), (q_rows, heads[0], dv)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return Inputs(q, k, v, dout, torch.randn(heads[0], q_rows, dtype=wide, device=device))


def assert_packed_within_budget(
    actual: Results, inputs: Inputs, lengths: Lengths, *, causal: bool | str = False, features: Features | None = None
) -> None:
    """Hold what an implementation made of packed ``inputs`` to the budget of `assert_within_budget`.

    The oracle, naive and the terms are those of each sequence called by itself. Features are of all sequences: tensors
    of two axes (sequences or 1, heads), or of four, rows and columns being those of the longest.

    Raises AssertionError if it is beyond it; the message lists every result.
    """
    features = features or {}
    whole: list[Results] = [
        {name: torch.zeros_like(x, dtype=torch.float64) for name, x in actual.items()} for _ in POWERS
    ]
    if returns_lse := "lse" in actual:
        blind = features.get("sinks", torch.full((actual["lse"].shape[0],), -math.inf))
        for total in whole[:2]:
            total["lse"] += blind.detach().to(total["lse"])[:, None]  # of rows of no sequence, which see nothing
    first_q = first_k = 0
    for number, (q_len, k_len) in enumerate(lengths):
        rows, columns = slice(first_q, first_q + q_len), slice(first_k, first_k + k_len)
        first_q, first_k = rows.stop, columns.stop
        spans = (rows, columns, columns, rows)
        q, k, v, dout = (x[span].transpose(0, 1)[None] for x, span in zip(inputs[:4], spans, strict=True))
        indices = {name: _index(x, number, q_len, k_len) for name, x in features.items()}
        given = {
            name: x[indices[name]].detach().requires_grad_(x.requires_grad) if indices[name] else x
            for name, x in features.items()
        }
        own = Inputs(q, k, v, dout, inputs.dlse[None, :, rows])
        budget = budget_of(own, causal=causal, features=given, return_lse=returns_lse)
        for total, power, results in zip(whole, POWERS, budget, strict=True):
            assert results is not None
            for name, x in results.items():
                if name not in actual:
                    continue
                span = {"out": rows, "dq": rows, "dk": columns, "dv": columns}.get(name)
                if name == "lse":
                    total[name][:, rows] = x.reshape(total[name][:, rows].shape)
                elif span is not None:
                    total[name][span] = x.reshape(total[name].shape[1], *x.shape[-2:]).transpose(0, 1)
                else:
                    index = indices.get(name.removeprefix("d"), ())
                    total[name][index] += x.reshape(total[name][index].shape) ** power
    if "dsinks" in actual:
        for total, power in zip(whole[:3], POWERS, strict=False):
            total["dsinks"] += (inputs.dlse[:, first_q:].double() ** power).sum(-1)
    exact, naive, summed, rounded = whole
    naive = {name: x.to(actual[name].dtype) for name, x in naive.items()}
    for squares in whole[2:]:
        squares |= {name: x.sqrt() for name, x in squares.items() if name not in ("out", "lse", "dq", "dk", "dv")}
    hold(actual, Budget(exact, naive, summed, rounded), "the error is beyond the budget")


POWERS = (1, 1, 2, 2)
"""In which the contributions of sequences to each summand of `Budget` add up."""


def _index(tensor: Any, number: int, q_len: int, k_len: int) -> tuple[Any, ...]:
    """The index of what a feature has for a sequence; () for what is no tensor, or the same for all."""
    if not isinstance(tensor, Tensor) or tensor.ndim < 2:
        return ()
    spans = (slice(number, number + 1), slice(None), slice(0, q_len), slice(0, k_len))[: tensor.ndim]
    return tuple(span if size > 1 else slice(None) for span, size in zip(spans, tensor.shape, strict=True))


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
    lse: Tensor | None,
    cache: Cache,
    *,
    scale: float | None = None,
    eps: float | None = None,
    features: Features | None = None,
) -> None:
    """Hold ``out`` and, if given, ``lse`` of each sequence to the budget of `assert_within_budget`.

    The oracle, naive and the terms are those of causal attention over the sequence's own slots. ``features`` are a
    ``window`` and a ``softcap``, if any.

    Raises AssertionError if one is beyond it; the message names the sequence and lists its results.
    """
    capacity = cache.k.shape[2]
    for number, length in enumerate(cache.lengths.clamp(0, capacity).tolist()):
        one = slice(number, number + 1)
        q, k, v = cache.q[one], cache.k[one, :, :length], cache.v[one, :, :length]
        inputs = Inputs(q, k, v, torch.zeros_like(out[one]), out.new_zeros(q.shape[:-1]))
        held_to = budget_of(inputs, causal=True, scale=scale, features=features)
        message = f"the error of sequence {number}, of {length} slots, is beyond the budget"
        given = {"out": out[one]} if lse is None else {"out": out[one], "lse": lse[one]}
        hold(given, held_to, message, eps=eps)
