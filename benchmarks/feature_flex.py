"""FlexAttention's way of computing each case of the features benchmark."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_providers import causal_block_mask
from benchmarks.feature_setting import (
    ONE_ROW,
    Attend,
    Contender,
    Setting,
    alibi_slopes,
    document_ids,
    random_bias,
    random_sinks,
    random_table,
    sequence_ids,
)

# One function serves all cases, and each case, length and pass is a compilation of it. Beyond the limit it would be an
# error, since only whole graphs are taken.
_MOST_COMPILATIONS = 1024

_ROWS = 8192
"""Of a mask that are looked at together; whole blocks."""


def _limits_raised() -> None:
    torch.compiler.config.recompile_limit = _MOST_COMPILATIONS
    torch.compiler.config.accumulated_recompile_limit = _MOST_COMPILATIONS


@functools.cache
def compiled() -> Attend:
    """FlexAttention, compiled, in whole graphs alone; one function for the whole process."""
    from torch.nn.attention.flex_attention import flex_attention

    _limits_raised()
    attend: Attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return attend


@functools.cache
def compiled_with_sinks() -> Attend:
    """FlexAttention whose output is scaled by the share of the softmax that a sink leaves, compiled together."""
    _limits_raised()
    attend: Attend = torch.compile(with_sinks, dynamic=False, fullgraph=True)
    return attend


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, block_mask: Any) -> Tensor:
    """Attention with a sink for each head, made of attention without and its log-sum-exp."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = flex_attention(q, k, v, block_mask=block_mask, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return (out * torch.sigmoid(aux.lse - sinks[:, None])[..., None]).to(out.dtype)


def block_mask(visible: Attend, length: int, device: torch.device) -> Any:
    """FlexAttention's lists of blocks of a mask, which all heads and batch entries share.

    They are what `create_block_mask` makes of the whole mask. It counts pairs in int64, which takes more than 32 GiB at
    length 65,536; here it is given some rows at a time.
    """
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    def strip(first: int) -> Any:
        def below(batch: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
            return visible(batch, head, row + first, column)

        rows = min(_ROWS, length - first)
        return create_block_mask(below, None, None, rows, length, device=str(device))

    if length <= _ROWS:
        return create_block_mask(visible, None, None, length, length, device=str(device))
    strips = [strip(first) for first in range(0, length, _ROWS)]
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists: dict[str, Any] = {name: torch.cat([getattr(strip, name) for strip in strips], 2) for name in names}
    block = strips[0].BLOCK_SIZE
    return BlockMask.from_kv_blocks(**lists, BLOCK_SIZE=block, mask_mod=visible, seq_lengths=(length, length))


def causal(setting: Setting) -> Contender:
    """Plain causal attention."""
    mask = causal_block_mask(setting.sizes.length, setting.device)
    return Contender(functools.partial(compiled(), block_mask=mask))


def window(size: int, setting: Setting) -> Contender:
    """Causal, and so many keys before each query's own."""

    def visible(batch: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        # Not `row - column <= size`: while the lists are made that would be an integer for each pair.
        return (row >= column) & (column >= row - size)

    mask = block_mask(visible, setting.sizes.length, setting.device)
    return Contender(functools.partial(compiled(), block_mask=mask))


def same_number(ids: Tensor) -> Any:
    """Causal among tokens with the same number."""

    def visible(batch: Any, head: Any, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & (ids[row] == ids[column])

    return block_mask(visible, ids.numel(), ids.device)


def documents(setting: Setting) -> Contender:
    """Causal within documents."""
    return Contender(functools.partial(compiled(), block_mask=same_number(document_ids(setting))))


def packed(setting: Setting) -> Contender:
    """All tokens in one row, with a document for each sequence."""
    mask = same_number(sequence_ids(setting))
    return Contender(functools.partial(compiled(), block_mask=mask), ONE_ROW)


def _scored(change: Attend, setting: Setting, leaves: tuple[Tensor, ...] = ()) -> Contender:
    mask = causal_block_mask(setting.sizes.length, setting.device)
    return Contender(functools.partial(compiled(), score_mod=change, block_mask=mask), leaves=leaves)


def softcap(cap: float, setting: Setting) -> Contender:
    """Causal, with capped scores."""

    def capped(score: Tensor, *place: Any) -> Tensor:
        return cap * torch.tanh(score / cap)

    return _scored(capped, setting)


def alibi(setting: Setting) -> Contender:
    """Causal, with ALiBi."""
    slopes = alibi_slopes(setting)

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score - slopes[head] * (row - column)

    return _scored(biased, setting)


def bias(learned: bool, setting: Setting) -> Contender:
    """Causal, with a bias for each head and pair."""
    numbers = random_bias(setting, learned)

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score + numbers[head, row, column]

    return _scored(biased, setting, (numbers,) if learned else ())


def relative_bias(setting: Setting) -> Contender:
    """Causal, with a bias for each head and distance."""
    table = random_table(setting)
    middle = setting.sizes.length - 1

    def biased(score: Tensor, batch: Any, head: Any, row: Any, column: Any) -> Tensor:
        return score + table[head, column - row + middle]

    return _scored(biased, setting, (table,))


def sinks(setting: Setting) -> Contender:
    """Causal, with a sink for each head."""
    numbers = random_sinks(setting)
    mask = causal_block_mask(setting.sizes.length, setting.device)
    attend = functools.partial(compiled_with_sinks(), sinks=numbers, block_mask=mask)
    return Contender(attend, leaves=(numbers,))
