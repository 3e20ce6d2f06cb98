"""Attention as it is written on paper: the oracle that every other implementation is tested against."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ..kernels.call import NO_AUX, Aux, Call, Options
from ..kernels.torch_names import exporting, must_dispatch, recompiled
from ..ranges import named_range
from .pairs import Pairs, by_group, changed_scores, kept_pairs, seen_pairs
from .precision import without_autocast

MOST_SCORES_ON_CPU = 32 * 2**20
"""Bytes of scores for which naive is chosen on a CPU; a training step keeps two or three times that for each layer."""
MOST_VARIANTS = 256
_one_at_a_time = threading.Lock()


def naive(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    options: Options,
    return_lse: bool,
    aux: Aux = NO_AUX,
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"] | None]:
    """softmax(q kᵀ · scale) v with every score in memory (Vaswani et al., "Attention is all you need", 2017).

    Works on any device and dtype, and is differentiable any number of times. Tensors without a head axis pass one of
    size 1. The log-sum-exp is float32 (float64 for float64 inputs), and None unless asked for. With
    ``aux.cache_lengths`` k and v are a KV cache.
    """
    with without_autocast(q.device):
        return _naive(q, k, v, options, return_lse, aux)


def _naive(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, aux: Aux
) -> tuple[Tensor, Tensor | None]:
    call = Call(q, k, v, options, aux)
    k_len = call.k_len
    scores, pairs = visible_scores(call)
    if aux.cache_lengths is not None:
        # 0 times anything finite is 0, but slots that were never written may hold NaN.
        v = v.masked_fill((pairs.column >= _filled(aux.cache_lengths, k_len))[:, :, 0].mT, 0.0)
    if aux.sinks is not None:
        scores = with_sinks(scores, aux.sinks, k)
    blind = None
    # An exported program is one for all lengths, also those for which a query sees nothing.
    any_lengths = exporting() and not (options.window_right is None and options.is_causal_or_full)
    if any_lengths or call.hides_rows:
        # A softmax over nothing is NaN, and so would be its gradient: such rows get scores of 0 and weights of 0.
        blind = (scores == float("-inf")).all(-1, keepdim=True)
        scores = scores.masked_fill(blind, 0.0)
    with named_range("attention: softmax"):
        weights = torch.softmax(scores, dim=-1) if scores.shape[-1] > 0 else scores
    weights = weights if blind is None else weights.masked_fill(blind, 0.0)
    weights = weights[..., :k_len]
    if aux.seed is not None:
        kept = kept_pairs(options, pairs, aux.seed)
        weights = weights.masked_fill(~kept, 0.0) * options.keep_scale
    with named_range("attention: values"):
        out = einsum(weights, v, "... kv group row column, ... kv column d -> ... kv group row d")
    out = rearrange(out, "... kv group row d -> ... (kv group) row d")
    if not return_lse:
        return out, None
    lse = torch.logsumexp(scores if scores.dtype == torch.float64 else scores.float(), dim=-1)
    lse = lse if blind is None else lse.masked_fill(blind.squeeze(-1), float("-inf"))
    return out, rearrange(lse, "... kv group row -> ... (kv group) row")


def visible_scores(call: Call) -> tuple[Float[Tensor, "*batch kv_heads group q_len k_len"], Pairs]:
    """The scores after all changes, -inf where a query does not see a key, and their pairs."""
    q, k, options, aux = call.q, call.k, call.options, call.aux
    # Each key and value head serves a group of query heads; einsum broadcasts it without a copy.
    grouped = rearrange(q, "... (kv group) row d -> ... kv group row d", kv=max(1, k.shape[-3]))
    with named_range("attention: scores"):
        scores = einsum(grouped, k, "... kv group row d, ... kv column d -> ... kv group row column") * options.scale
        pairs = Pairs.of(options, aux, q, k, slice(0, call.q_len), slice(0, call.k_len))
        scores = changed_scores(options, scores, pairs, aux.score_aux)
    with named_range("attention: mask"):
        seen = seen_pairs(options, pairs, call.band, aux.mask_aux)
        if aux.cache_lengths is not None:
            seen = _seen_in_cache(_filled(aux.cache_lengths, call.k_len), pairs, call.q_len, options.window_left)
        return scores if seen is None else scores.masked_fill(~seen, float("-inf")), pairs


def with_sinks(scores: Tensor, sinks: Tensor, k: Tensor) -> Tensor:
    """The scores with one more key, which every query sees: the sink of its head."""
    logits = by_group(sinks.to(scores.dtype), k)[..., None]
    return torch.cat([scores, logits.expand(*scores.shape[:-1], 1)], -1)


def is_faster_than_tiled(call: Call) -> bool:
    """Whether naive is the better choice on a CPU, where it passes over its scores fewer times: they are few.

    In 16 bits naive rounds its scores to them. An exported program is for any length; packed sequences have few pairs.
    """
    if call.device.type != "cpu" or call.dtype.itemsize < 4 or call.is_packed or exporting():
        return False
    if not torch.compiler.is_compiling() and must_dispatch(call.q, call.k, call.v):
        return False
    return math.prod(call.q.shape[:-1]) * call.k_len * call.dtype.itemsize <= MOST_SCORES_ON_CPU


def _filled(cache_lengths: Tensor, capacity: int) -> Tensor:
    """The filled slots of each sequence's cache: (batch, 1, 1, 1, 1)."""
    return cache_lengths.to(torch.int64).clamp(0, capacity)[:, None, None, None, None]


def _seen_in_cache(filled: Tensor, pairs: Pairs, new: int, window_left: int | None) -> Tensor:
    """Which slots the last ``new`` tokens see, the last being in slot filled - 1: (batch, 1, 1, new, capacity)."""
    distance = filled - new + pairs.row - pairs.column
    seen = distance >= 0
    return seen if window_left is None else seen & (distance <= window_left)


@functools.cache
def _compiler() -> tuple[Callable[..., tuple[Tensor, Tensor | None]], AbstractContextManager[object]]:
    # A program may well use more than 8 combinations of shapes and options, where torch.compile would give up. It takes
    # seconds to import what it needs, so that waits for the first use.
    patience = recompiled(MOST_VARIANTS)
    return torch.compile(naive, fullgraph=patience is not None), patience or nullcontext()


def compiled(
    q: Tensor, k: Tensor, v: Tensor, options: Options, return_lse: bool, aux: Aux = NO_AUX
) -> tuple[Tensor, Tensor | None]:
    """`naive` through ``torch.compile``: the same memory, fewer passes over it."""
    function, patience = _compiler()
    # A lock, because the limit is one for all threads in some versions of torch.
    with _one_at_a_time, patience:
        return function(q, k, v, options, return_lse, aux)
