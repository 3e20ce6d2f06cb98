"""FlashAttention-4's and torch's way of computing cases of the features benchmark."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention_providers import peer_providers
from benchmarks.feature_setting import (
    HEADS_FIRST,
    LENGTH_FIRST,
    PACKED,
    Attend,
    Contender,
    Maker,
    Setting,
    Sizes,
    as_starts,
    document_ids,
    lengths_of,
    padded,
    random_bias,
    random_sinks,
    sequence_starts,
)


def why_no_fa4(device: torch.device) -> str | None:
    """Why FlashAttention-4 is not measured at all; None where it can be."""
    (provider,) = (peer for peer in peer_providers(device) if peer.name == "fa4")
    return provider.missing


def _fa4(name: str, *settings: Any, **named: Any) -> Attend:
    function = getattr(importlib.import_module("flash_attn.cute"), name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # It returns the log-sum-exp, or None for it, beside the output whether asked to or not.
        result = function(q, k, v, *settings, **named)
        output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return output

    return attend


def fa4(setting: Setting, **named: Any) -> Contender:
    """Causal, with what FlashAttention-4 takes besides."""
    return Contender(_fa4("flash_attn_func", causal=True, **named), LENGTH_FIRST)


def fa4_window(size: int, setting: Setting) -> Contender:
    """Causal, and so many keys before each query's own."""
    return fa4(setting, window_size=(size, 0))


def fa4_sinks(setting: Setting) -> Contender:
    """Causal, with a sink for each head."""
    sinks = random_sinks(setting)
    return fa4(setting, learnable_sink=sinks)._replace(leaves=(sinks,))


def fa4_packed(starts_of: Callable[[Sizes], list[int]], setting: Setting) -> Contender:
    """Causal, of sequences one after another."""
    starts = starts_of(setting.sizes)
    on_device, longest = as_starts(starts, setting.device), max(lengths_of(starts))
    lengths = {"cu_seqlens_q": on_device, "cu_seqlens_k": on_device}
    most = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return Contender(_fa4("flash_attn_varlen_func", causal=True, **lengths, **most), PACKED)


def sdpa(setting: Setting, **named: Any) -> Contender:
    """Causal, with what torch's function takes besides."""
    return Contender(functools.partial(F.scaled_dot_product_attention, is_causal=True, **named))


def _sdpa_masked(mask: Tensor) -> Contender:
    return Contender(functools.partial(F.scaled_dot_product_attention, attn_mask=mask[None]))


def _rows_and_columns(setting: Setting) -> tuple[Tensor, Tensor]:
    # int32: at length 65,536 nothing that has an element for each pair may be wider than it must.
    places = torch.arange(setting.sizes.length, device=setting.device, dtype=torch.int32)
    return places[:, None], places


def sdpa_window(size: int, setting: Setting) -> Contender:
    """The window as a mask with an element for each pair."""
    row, column = _rows_and_columns(setting)
    return _sdpa_masked(((row >= column) & (column >= row - size))[None])


def sdpa_documents(setting: Setting) -> Contender:
    """The documents as a mask with an element for each pair."""
    row, column = _rows_and_columns(setting)
    ids = document_ids(setting)
    return _sdpa_masked(((row >= column) & (ids[:, None] == ids))[None])


def sdpa_bias(learned: bool, setting: Setting) -> Contender:
    """The bias as a mask that is added. One that learns hides what is not visible anew in each call."""
    row, column = _rows_and_columns(setting)
    hidden, bias = row < column, random_bias(setting, learned)
    if not learned:
        return _sdpa_masked(bias.masked_fill_(hidden, float("-inf")))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(hidden, float("-inf"))[None])

    return Contender(attend, HEADS_FIRST, (bias,))


def sdpa_padded(setting: Setting) -> Contender:
    """Packed sequences, each padded to the longest. Padding comes last, so no token before it sees it."""
    return sdpa(setting)._replace(layout=padded(sequence_starts(setting.sizes)))


NO_FA4: dict[str, Maker | str] = {"fa4": "fa4 has no such argument"}
WRITTEN_OUT: dict[str, Maker | str] = {"sdpa": "sdpa takes it only written out for each pair, which is the case bias"}
