"""The cases of the features benchmark: who computes each and how, and the share of the pairs that is visible."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from benchmarks import feature_flex, feature_peers
from benchmarks.feature_peers import NO_FA4, WRITTEN_OUT
from benchmarks.feature_setting import (
    PACKED,
    Contender,
    Maker,
    Setting,
    Sizes,
    alibi_slopes,
    as_starts,
    document_ids,
    documents_of_all,
    lengths_of,
    random_bias,
    random_sinks,
    random_table,
    sequence_starts,
)
from cs336_systems.attention import attention, attention_varlen, variants

OURS, PEERS = "ours", ("flex", "fa4", "sdpa")
PLAIN = "causal"
_CAP = 30.0
_DROPPED = 0.1


class Case(NamedTuple):
    """Contenders by name, or why one cannot; the visible share of the pairs; the lengths that are usual for it."""

    makers: Mapping[str, Maker | str]
    visible: Callable[[Sizes], float]
    lengths: tuple[int, ...] = ()
    random: bool = False
    """Whether results differ by chance, and say nothing when compared."""


def _ours(setting: Setting, **features: object) -> Contender:
    return Contender(functools.partial(attention, causal=True, impl=setting.impl, **features))


def _our_documents(listed: bool, setting: Setting) -> Contender:
    mask = variants.document(document_ids(setting)[None])
    length = setting.sizes.length
    return _ours(setting, mask=mask.with_blocks(length, length, causal=True) if listed else mask)


def _our_alibi(setting: Setting) -> Contender:
    return _ours(setting, alibi_slopes=alibi_slopes(setting))


def _our_bias(learned: bool, setting: Setting) -> Contender:
    bias = random_bias(setting, learned)
    return _ours(setting, bias=bias)._replace(leaves=(bias,) if learned else ())


def _our_relative_bias(setting: Setting) -> Contender:
    table = random_table(setting)
    return _ours(setting, scores=variants.relative_bias(table))._replace(leaves=(table,))


def _our_sinks(setting: Setting) -> Contender:
    sinks = random_sinks(setting)
    return _ours(setting, sinks=sinks)._replace(leaves=(sinks,))


def _our_dropout(setting: Setting) -> Contender:
    return _ours(setting, dropout_p=_DROPPED, seed=torch.tensor([7], device=setting.device))


def _our_packed(setting: Setting) -> Contender:
    starts = as_starts(sequence_starts(setting.sizes), setting.device)
    attend = functools.partial(attention_varlen, cu_seqlens_q=starts, causal=True, impl=setting.impl)
    return Contender(attend, PACKED)


def _triangles(lengths: list[int], sizes: Sizes) -> float:
    """Of sequences that are causal each, in pairs of tokens of the same entry of the batch."""
    return sum(length * (length + 1) / 2 for length in lengths) / (sizes.tokens * sizes.length)


def _causal_share(sizes: Sizes) -> float:
    return _triangles([sizes.length] * sizes.batch, sizes)


def _document_share(sizes: Sizes) -> float:
    return _triangles(lengths_of(documents_of_all(sizes)), sizes)


def _packed_share(sizes: Sizes) -> float:
    return _triangles(lengths_of(sequence_starts(sizes)), sizes)


def _window(size_of: Callable[[int], int], lengths: tuple[int, ...] = ()) -> Case:
    """Causal, and as many keys before each query's own as the length says."""

    def ours(setting: Setting) -> Contender:
        return _ours(setting, window=(size_of(setting.sizes.length), None))

    def of(make: Callable[[int, Setting], Contender]) -> Maker:
        return lambda setting: make(size_of(setting.sizes.length), setting)

    def visible(sizes: Sizes) -> float:
        size = min(size_of(sizes.length), sizes.length - 1)
        return ((size + 1) * sizes.length - size * (size + 1) / 2) / sizes.length**2

    peers = {
        "flex": of(feature_flex.window),
        "fa4": of(feature_peers.fa4_window),
        "sdpa": of(feature_peers.sdpa_window),
    }
    return Case({OURS: ours, **peers}, visible, lengths)


def _causal_case(ours: Maker, peers: Mapping[str, Maker | str], *, random: bool = False) -> Case:
    return Case({OURS: ours, **peers}, _causal_share, random=random)


_bound = functools.partial

CASES: dict[str, Case] = {
    PLAIN: _causal_case(_ours, {"flex": feature_flex.causal, "fa4": feature_peers.fa4, "sdpa": feature_peers.sdpa}),
    "window_4096": _window(lambda length: 4096, (16384, 65536)),
    "window_quarter": _window(lambda length: length // 4),
    "window_sixteenth": _window(lambda length: length // 16),
    "document": Case(
        {
            OURS: _bound(_our_documents, True),
            "flex": feature_flex.documents,
            "fa4": _bound(feature_peers.fa4_packed, documents_of_all),
            "sdpa": feature_peers.sdpa_documents,
        },
        _document_share,
    ),
    "document_unlisted": Case({OURS: _bound(_our_documents, False)}, _document_share),
    "packed": Case(
        {
            OURS: _our_packed,
            "flex": feature_flex.packed,
            "fa4": _bound(feature_peers.fa4_packed, sequence_starts),
            "sdpa": feature_peers.sdpa_padded,
        },
        _packed_share,
    ),
    "softcap": _causal_case(
        _bound(_ours, softcap=_CAP),
        {
            "flex": _bound(feature_flex.softcap, _CAP),
            "fa4": _bound(feature_peers.fa4, softcap=_CAP),
            "sdpa": "sdpa has no such argument",
        },
    ),
    "alibi": _causal_case(_our_alibi, {"flex": feature_flex.alibi, **NO_FA4, **WRITTEN_OUT}),
    "bias": _causal_case(
        _bound(_our_bias, False),
        {"flex": _bound(feature_flex.bias, False), **NO_FA4, "sdpa": _bound(feature_peers.sdpa_bias, False)},
    ),
    "learned_bias": _causal_case(
        _bound(_our_bias, True),
        {"flex": _bound(feature_flex.bias, True), **NO_FA4, "sdpa": _bound(feature_peers.sdpa_bias, True)},
    ),
    "relative_bias": _causal_case(_our_relative_bias, {"flex": feature_flex.relative_bias, **NO_FA4, **WRITTEN_OUT}),
    "sinks": _causal_case(
        _our_sinks,
        {"flex": feature_flex.sinks, "fa4": feature_peers.fa4_sinks, "sdpa": "sdpa has no such argument"},
    ),
    "dropout": _causal_case(
        _our_dropout,
        {
            "flex": "flex has no dropout",
            **NO_FA4,
            "sdpa": _bound(feature_peers.sdpa, dropout_p=_DROPPED),
        },
        random=True,
    ),
}
