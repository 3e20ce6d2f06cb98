"""Attention as it is written on paper: the oracle that every other implementation is tested against."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from .precision import without_autocast
from .spec import AttentionSpec, Causal

MOST_VARIANTS = 256


def naive(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    spec: AttentionSpec,
    return_lse: bool,
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"] | None]:
    """softmax(q kᵀ · scale) v with every score in memory (Vaswani et al., "Attention is all you need", 2017).

    Works on any device and dtype, and is differentiable any number of times. Tensors without a head axis pass one of
    size 1. The log-sum-exp is float32 (float64 for float64 inputs), and None unless asked for.
    """
    with without_autocast(q.device):
        return _naive(q, k, v, spec, return_lse)


def _naive(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    q_len, k_len = q.shape[-2], k.shape[-2]
    # Each key and value head serves a group of query heads; einsum broadcasts it without a copy.
    grouped = rearrange(q, "... (kv group) row d -> ... kv group row d", kv=max(1, k.shape[-3]))
    scores = einsum(grouped, k, "... kv group row d, ... kv column d -> ... kv group row column") * spec.scale
    if spec.causal is not Causal.NONE:
        seen = spec.visible(slice(0, q_len), slice(0, k_len), spec.diagonal(q_len, k_len), q.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    if k_len == 0:
        weights = scores
    elif spec.hides_rows(q_len, k_len):
        # A softmax over nothing is NaN, and so would be its gradient: such rows get scores of 0 and weights of 0.
        sees_any = seen.any(-1, keepdim=True)
        weights = torch.softmax(scores.masked_fill(~sees_any, 0.0), dim=-1).masked_fill(~sees_any, 0.0)
    else:
        weights = torch.softmax(scores, dim=-1)
    out = einsum(weights, v, "... kv group row column, ... kv column d -> ... kv group row d")
    out = rearrange(out, "... kv group row d -> ... (kv group) row d")
    if not return_lse:
        return out, None
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    return out, rearrange(lse, "... kv group row -> ... (kv group) row")


@functools.cache
def _compiler() -> tuple[Callable[..., tuple[Tensor, Tensor | None]], AbstractContextManager[object]]:
    # A program may well use more than 8 combinations of shapes and specs, where dynamo would give up. Importing it
    # takes seconds, so that waits for the first use.
    import torch._dynamo

    return torch.compile(naive, fullgraph=True), torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS)


def compiled(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """`naive` through ``torch.compile``: the same memory, fewer passes over it."""
    function, patience = _compiler()
    with patience:
        return function(q, k, v, spec, return_lse)
