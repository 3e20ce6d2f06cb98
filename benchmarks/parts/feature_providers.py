"""How each library computes a feature: its function, its arguments, and the layout of q, k and v."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.lib.attention_providers import block_mask, output_alone
from benchmarks.parts.feature_cases import Feature, Sizes
from cs336_systems.attention import attention, attention_varlen

Attend = Callable[..., Tensor]
OURS = ("flash", "tiled", "naive", "compiled")
PEERS = ("flex", "fa4", "torch")


class Layout(NamedTuple):
    """How a function takes q, k and v, from (batch, heads, length, d); and its output as (tokens, heads, d)."""

    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]


def _pack(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


HEADS_FIRST = Layout(lambda x: x, _pack)
LENGTH_FIRST = Layout(lambda x: x.transpose(1, 2).contiguous(), lambda x: x.flatten(0, 1))
PACKED = Layout(lambda x: _pack(x).contiguous(), lambda x: x)
ONE_SEQUENCE = Layout(lambda x: _pack(x).transpose(0, 1)[None].contiguous(), lambda x: x[0].transpose(0, 1))
"""All tokens as one entry of the batch."""


def padded(lengths: Sequence[int]) -> Layout:
    """Sequences of these lengths as entries of the batch, each with zeros up to the longest."""
    return Layout(
        lambda x: pad_sequence(list(_pack(x).split(list(lengths))), batch_first=True).transpose(1, 2).contiguous(),
        lambda x: torch.cat([row[:length] for row, length in zip(x.transpose(1, 2), lengths, strict=True)]),
    )


def bind(provider: str, feature: Feature, sizes: Sizes) -> tuple[Attend, Layout]:
    """The function of q, k and v that computes the feature, and their layout. Raises NotImplementedError otherwise."""
    if provider in feature.refusals:
        raise NotImplementedError(feature.refusals[provider])
    binders = {"flex": _bind_flex, "fa4": _bind_fa4, "torch": _bind_torch}
    return binders.get(provider, functools.partial(_bind_ours, provider))(feature, sizes)


def _starts(feature: Feature, device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(feature.sequences)], dtype=torch.int32, device=device)


def _bind_ours(implementation: str, feature: Feature, sizes: Sizes) -> tuple[Attend, Layout]:
    if feature.packed:
        starts = _starts(feature, sizes.device)
        return functools.partial(attention_varlen, cu_seqlens_q=starts, causal=True, impl=implementation), PACKED
    return functools.partial(attention, **{"causal": True, "impl": implementation, **feature.ours}), HEADS_FIRST


def _bind_fa4(feature: Feature, sizes: Sizes) -> tuple[Attend, Layout]:
    module = importlib.import_module("flash_attn.cute")
    function, arguments = module.flash_attn_func, dict(feature.fa4)
    if feature.sequences:
        starts, longest = _starts(feature, sizes.device), max(feature.sequences)
        function, arguments = module.flash_attn_varlen_func, {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        arguments |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

    attend = functools.partial(output_alone(function), causal=True, **arguments)
    return attend, PACKED if feature.sequences else LENGTH_FIRST


def _bind_torch(feature: Feature, sizes: Sizes) -> tuple[Attend, Layout]:
    attend, added = F.scaled_dot_product_attention, feature.added
    if feature.packed:
        # Padding comes last, where no token of the sequence sees it.
        return functools.partial(attend, is_causal=True), padded(feature.sequences)
    if added is not None:
        once = None if feature.leaves else added()
        return lambda q, k, v: attend(q, k, v, attn_mask=added() if once is None else once), HEADS_FIRST
    if feature.mask is None:
        return functools.partial(attend, is_causal=True, **feature.torch), HEADS_FIRST
    # int32: nothing that has an element for each pair may be wider than it must.
    index = torch.arange(sizes.length, device=sizes.device, dtype=torch.int32)
    return functools.partial(attend, attn_mask=feature.mask(index[:, None], index)[None, None]), HEADS_FIRST


def _bind_flex(feature: Feature, sizes: Sizes) -> tuple[Attend, Layout]:
    mask = feature.mask or (lambda query, key: query >= key)
    blocks = block_mask(mask, sizes.tokens if feature.packed else sizes.length, sizes.device)
    arguments = {"score_mod": feature.score_mod, "sinks": feature.sinks, "block_mask": blocks}
    return functools.partial(compiled_flex(), **arguments), ONE_SEQUENCE if feature.packed else HEADS_FIRST


@functools.cache
def compiled_flex() -> Attend:
    """`flex`, compiled for the shapes of each call; an error where torch would run some of it eagerly."""
    attend: Attend = torch.compile(flex, dynamic=False, fullgraph=True)
    return attend


def flex(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **arguments: Any) -> Tensor:
    """FlexAttention; with sinks its output times sigmoid(lse − sink), the softmax's share without the sink."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if sinks is None:
        return flex_attention(q, k, v, **arguments)
    out, aux = flex_attention(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)
