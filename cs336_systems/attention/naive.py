"""Attention as it is written on paper: the oracle that every other implementation is tested against."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ..kernels.torch_names import exporting, recompiled
from ..ranges import named_range
from .pairs import Extras, Pairs, by_group, changed_scores, kept_pairs, seen_pairs
from .precision import without_autocast
from .spec import AttentionSpec, Causal

MOST_VARIANTS = 256
_one_at_a_time = threading.Lock()


def naive(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    spec: AttentionSpec,
    return_lse: bool,
    extras: tuple[Tensor, ...] = (),
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"] | None]:
    """softmax(q kᵀ · scale) v with every score in memory (Vaswani et al., "Attention is all you need", 2017).

    Works on any device and dtype, and is differentiable any number of times. Tensors without a head axis pass one of
    size 1. The log-sum-exp is float32 (float64 for float64 inputs), and None unless asked for. ``extras`` are the
    tensors that the spec asks for.
    """
    with without_autocast(q.device):
        return _naive(q, k, v, spec, return_lse, Extras.of(spec, extras))


def _naive(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool, extras: Extras
) -> tuple[Tensor, Tensor | None]:
    q_len, k_len = q.shape[-2], k.shape[-2]
    # Each key and value head serves a group of query heads; einsum broadcasts it without a copy.
    grouped = rearrange(q, "... (kv group) row d -> ... kv group row d", kv=max(1, k.shape[-3]))
    with named_range("attention: scores"):
        scores = einsum(grouped, k, "... kv group row d, ... kv column d -> ... kv group row column") * spec.scale
        pairs = Pairs.of(spec, extras, q, k, slice(0, q_len), slice(0, k_len))
        scores = changed_scores(spec, scores, pairs, extras.by_scores)
    with named_range("attention: mask"):
        seen = seen_pairs(spec, pairs, spec.band(q_len, k_len), extras)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
    if extras.sinks is not None:
        # A key that every query sees, without a value.
        sinks = by_group(extras.sinks.to(scores.dtype), k)[..., None]
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    blind = None
    # An exported program is one for all lengths, also those for which a query sees nothing.
    any_lengths = exporting() and not (spec.causal is Causal.NONE and spec.is_plain)
    if any_lengths or spec.hides_rows(q_len, k_len):
        # A softmax over nothing is NaN, and so would be its gradient: such rows get scores of 0 and weights of 0.
        blind = (scores == float("-inf")).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
    with named_range("attention: softmax"):
        weights = torch.softmax(scores, dim=-1) if scores.shape[-1] > 0 else scores
    weights = weights if blind is None else weights.masked_fill(blind, 0.0)
    weights = weights[..., :k_len]
    if extras.seed is not None:
        kept = kept_pairs(spec, pairs, extras.seed)
        weights = weights.masked_fill(~kept, 0.0) * spec.as_settings.kept_scale
    with named_range("attention: values"):
        out = einsum(weights, v, "... kv group row column, ... kv column d -> ... kv group row d")
    out = rearrange(out, "... kv group row d -> ... (kv group) row d")
    if not return_lse:
        return out, None
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    lse = lse if blind is None else lse.masked_fill(blind.squeeze(-1), float("-inf"))
    return out, rearrange(lse, "... kv group row -> ... (kv group) row")


@functools.cache
def _compiler() -> tuple[Callable[..., tuple[Tensor, Tensor | None]], AbstractContextManager[object]]:
    # A program may well use more than 8 combinations of shapes and specs, where torch.compile would give up. It takes
    # seconds to import what it needs, so that waits for the first use.
    patience = recompiled(MOST_VARIANTS)
    return torch.compile(naive, fullgraph=patience is not None), patience or nullcontext()


def compiled(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool, extras: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """`naive` through ``torch.compile``: the same memory, fewer passes over it."""
    function, patience = _compiler()
    # A lock, because the limit is one for all threads in some versions of torch.
    with _one_at_a_time, patience:
        return function(q, k, v, spec, return_lse, extras)
