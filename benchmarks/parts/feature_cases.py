"""The features that features.py measures: each is a change to causal attention, as every library takes it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.attention_providers import Mask
from cs336_systems.attention import variants
from cs336_systems.attention.mods import mask_mod

Arguments = Mapping[str, Any]
_NO_ARGUMENT = {name: f"{name} has no such argument" for name in ("flex", "fa4", "torch")}
_NEITHER = {"fa4": _NO_ARGUMENT["fa4"], "torch": "torch takes only a number for each pair, as in the feature bias"}


@dataclass(frozen=True)
class Sizes:
    """What a feature is made for: q, k and v of (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        """The tokens of the batch."""
        return self.batch * self.length

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, learned: bool = False) -> Tensor:
        """Normal random numbers, which get a gradient if they are ``learned``."""
        return torch.randn(shape, dtype=dtype, device=self.device, requires_grad=learned)


@dataclass(frozen=True)
class Feature:
    """What is computed besides causal attention.

    Attributes:
        ours: arguments of `attention`, besides ``impl``; ``causal`` is True if it is not among them.
        fa4, torch: arguments of `flash_attn_func`, besides ``causal``, and of `scaled_dot_product_attention`.
        score_mod: FlexAttention's.
        mask: the visible pairs, if not those of a causal mask: FlexAttention's mask, and torch's boolean mask.
        added: torch's mask of numbers that are added; called for each call of attention if it has ``leaves``.
        sinks: a logit for each head, which FlexAttention applies by its log-sum-exp.
        leaves: tensors that get gradients besides q, k and v.
        sequences: lengths of the independent sequences that all tokens consist of; FlashAttention-4 takes them packed.
        packed: the others take these sequences packed, as one sequence, or padded.
        window: the keys that a query sees before its own; None for all.
        pattern: the mask is neither that of sequences nor of a window.
        random: results differ by chance, and cannot be compared.
        refusals: by library, why it cannot compute this.
    """

    ours: Arguments = field(default_factory=dict)
    fa4: Arguments = field(default_factory=dict)
    torch: Arguments = field(default_factory=dict)
    score_mod: Callable[..., Tensor] | None = None
    mask: Mask | None = None
    added: Callable[[], Tensor] | None = None
    sinks: Tensor | None = None
    leaves: tuple[Tensor, ...] = ()
    sequences: tuple[int, ...] = ()
    packed: bool = False
    window: int | None = None
    pattern: bool = False
    random: bool = False
    refusals: Mapping[str, str] = field(default_factory=dict)

    def visible(self, sizes: Sizes) -> float:
        """The share of the pairs of a query and a key of one sequence of the batch that is visible."""
        if self.pattern:
            assert self.mask is not None
            queries, keys = (torch.arange(sizes.length, device=sizes.device) for _ in range(2))
            return sum(float(self.mask(rows[:, None], keys).sum()) for rows in queries.split(1024)) / sizes.length**2
        pairs = 0.0
        for length in self.sequences or [sizes.length] * sizes.batch:
            hidden = 0 if self.window is None else max(0, length - 1 - self.window)
            pairs += (length * (length + 1) - hidden * (hidden + 1)) / 2
        return pairs / (sizes.tokens * sizes.length)


def document_lengths(sizes: Sizes) -> list[int]:
    """Random lengths of documents that fill one sequence, a thousand tokens in the mean."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randint(1, max(2, sizes.length), (max(1, sizes.length // 1024),), generator=generator).tolist()
    starts = sorted({0, sizes.length, *(start for start in inner if start < sizes.length)})
    return [stop - start for start, stop in itertools.pairwise(starts)]


def sequence_lengths(sizes: Sizes) -> list[int]:
    """Random lengths of sequences that add up to the tokens of the batch, at most 8,192 each."""
    generator, lengths, left = torch.Generator().manual_seed(0), list[int](), sizes.tokens
    while left:
        length = int(torch.randint(1, min(8192, sizes.length) + 1, (), generator=generator))
        lengths.append(min(left, length))
        left -= lengths[-1]
    return lengths


def _ids(lengths: Sequence[int], device: torch.device) -> Tensor:
    """The number of each token's sequence."""
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)).to(device)


def _same(ids: Tensor) -> Mask:
    return lambda query, key: (query >= key) & (ids[query] == ids[key])


def _refused(*libraries: str) -> dict[str, str]:
    return {name: _NO_ARGUMENT[name] for name in libraries}


def _window(share: int | None, sizes: Sizes) -> Feature:
    width = 4096 if share is None else sizes.length // share
    return Feature(
        ours={"window": (width, None)},
        fa4={"window_size": (width, 0)},
        # Not `query - key <= width`: that would be an integer for each pair.
        mask=lambda query, key: (query >= key) & (key >= query - width),
        window=width,
    )


def _document(listed: bool, sizes: Sizes) -> Feature:
    lengths = document_lengths(sizes)
    ids = _ids(lengths, sizes.device)
    mask: Any = variants.document(ids[None])
    refusals = {} if listed else dict.fromkeys(_NO_ARGUMENT, "measured as the feature document")
    if listed:
        mask = mask.with_blocks(sizes.length, sizes.length, causal=True)
    return Feature({"mask": mask}, mask=_same(ids), sequences=tuple(lengths * sizes.batch), refusals=refusals)


def _pattern(mask: Mask, sizes: Sizes) -> Feature:
    """One function of a pair, for this library and for FlexAttention."""

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask(q_idx, kv_idx)

    listed = mask_mod(seen).with_blocks(sizes.length, sizes.length, causal=True, device=sizes.device)
    return Feature({"mask": listed}, mask=mask, pattern=True, refusals=_refused("fa4"))


def _block_local(sizes: Sizes) -> Feature:
    """Causal attention within blocks of 256 tokens, or of a quarter of a shorter sequence."""
    size = max(1, min(256, sizes.length // 4))
    return _pattern(lambda query, key: (query >= key) & (query // size == key // size), sizes)


def _dilated(sizes: Sizes) -> Feature:
    """The last 256 tokens, and every 64th before them (Child et al., 2019); of short sequences fewer."""
    near, step = max(1, min(256, sizes.length // 4)), max(2, min(64, sizes.length // 8))
    return _pattern(lambda query, key: (query >= key) & ((query - key < near) | ((query - key) % step == 0)), sizes)


def _prefix(sizes: Sizes) -> Feature:
    """A prefix that all queries see, a quarter of the tokens (Raffel et al., 2020)."""
    length = max(1, sizes.length // 4)
    mask = variants.prefix(torch.tensor([length], device=sizes.device)) | variants.causal()
    return Feature(
        {"mask": mask.with_blocks(sizes.length, sizes.length), "causal": False},
        mask=lambda query, key: (query >= key) | (key < length),
        pattern=True,
        refusals=_refused("fa4"),
    )


def _prefix_tree(sizes: Sizes) -> Feature:
    """A shared half, and eight continuations that do not see one another, as in reinforcement learning."""
    shared, parts = sizes.length // 2, 8
    starts = [shared + (sizes.length - shared) * part // parts for part in range(parts + 1)]
    lengths = [shared, *(stop - start for start, stop in itertools.pairwise(starts))]
    ends = variants.tree_layout([lengths], [[-1] + [0] * parts], device=sizes.device).ends
    mask = variants.prefix_tree(ends).with_blocks(sizes.length, sizes.length, causal=True)
    return Feature(
        {"mask": mask},
        mask=lambda query, key: (query >= key) & (query < ends[0, key]),
        pattern=True,
        refusals=_refused("fa4"),
    )


def _dense_mask(sizes: Sizes) -> Feature:
    """Half of the pairs, at random, for all heads and entries."""
    seen = torch.rand(sizes.length, sizes.length, device=sizes.device) < 0.5
    seen.fill_diagonal_(True)
    return Feature(
        {"mask": seen},
        mask=lambda query, key: (query >= key) & seen[query, key],
        pattern=True,
        refusals=_refused("fa4"),
    )


def _packed(sizes: Sizes) -> Feature:
    lengths = sequence_lengths(sizes)
    return Feature(mask=_same(_ids(lengths, sizes.device)), sequences=tuple(lengths), packed=True)


def _softcap(sizes: Sizes) -> Feature:
    cap = 30.0
    return Feature(
        ours={"softcap": cap},
        fa4={"softcap": cap},
        score_mod=lambda score, *indices: cap * torch.tanh(score / cap),
        refusals=_refused("torch"),
    )


def _alibi(sizes: Sizes) -> Feature:
    slopes = torch.logspace(-1, -8, sizes.heads, 2.0, device=sizes.device)
    return Feature(
        ours={"alibi_slopes": slopes},
        score_mod=lambda score, batch, head, query, key: score - slopes[head] * (query - key),
        refusals=_NEITHER,
    )


def _bias(learned: bool, sizes: Sizes) -> Feature:
    bias = sizes.random(sizes.heads, sizes.length, sizes.length, dtype=sizes.dtype, learned=learned)
    hidden = torch.ones(sizes.length, sizes.length, dtype=torch.bool, device=sizes.device).triu(1)
    return Feature(
        ours={"bias": bias},
        score_mod=lambda score, batch, head, query, key: score + bias[head, query, key],
        added=lambda: bias.masked_fill(hidden, float("-inf"))[None],
        leaves=(bias,) if learned else (),
        refusals=_refused("fa4"),
    )


def _relative_bias(sizes: Sizes) -> Feature:
    middle = sizes.length - 1
    table = sizes.random(sizes.heads, 2 * middle + 1, learned=True)
    return Feature(
        ours={"scores": variants.relative_bias(table)},
        score_mod=lambda score, batch, head, query, key: score + table[head, key - query + middle],
        leaves=(table,),
        refusals=_NEITHER,
    )


def _sinks(sizes: Sizes) -> Feature:
    sinks = sizes.random(sizes.heads, learned=True)
    refusals = _refused("torch")
    return Feature({"sinks": sinks}, fa4={"learnable_sink": sinks}, sinks=sinks, leaves=(sinks,), refusals=refusals)


def _dropout(sizes: Sizes) -> Feature:
    ours = {"dropout_p": 0.1, "seed": torch.tensor([7], device=sizes.device)}
    return Feature(ours, torch={"dropout_p": 0.1}, random=True, refusals=_refused("flex", "fa4"))


FEATURES: dict[str, Callable[[Sizes], Feature]] = {
    "causal": lambda sizes: Feature(),
    "window_4096": functools.partial(_window, None),
    "window_quarter": functools.partial(_window, 4),
    "window_sixteenth": functools.partial(_window, 16),
    "document": functools.partial(_document, True),
    "document_unlisted": functools.partial(_document, False),
    "block_local": _block_local,
    "dilated": _dilated,
    "prefix": _prefix,
    "prefix_tree": _prefix_tree,
    "dense_mask": _dense_mask,
    "packed": _packed,
    "softcap": _softcap,
    "alibi": _alibi,
    "bias": functools.partial(_bias, False),
    "learned_bias": functools.partial(_bias, True),
    "relative_bias": _relative_bias,
    "sinks": _sinks,
    "dropout": _dropout,
}
"""By name. All but `prefix` are causal, and `causal` is nothing else."""
