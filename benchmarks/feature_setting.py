"""What the cases of the features benchmark are made of: sizes, layouts, and numbers that all contenders share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Attend = Callable[..., Tensor]


class Sizes(NamedTuple):
    """Of q, k and v: (batch, heads, length, head_dim)."""

    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Of all entries of the batch."""
        return self.batch * self.length


@dataclass(frozen=True)
class Setting:
    """The sizes of a case, where and in which dtype it is computed, and by which of our implementations."""

    sizes: Sizes
    device: torch.device
    dtype: torch.dtype
    impl: str = "flash"


class Layout(NamedTuple):
    """How a contender wants q, k and v, from (batch, heads, length, d); and its result as (tokens, heads, d)."""

    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor]


def _tokens_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(0, 1)


HEADS_FIRST = Layout(lambda tensor: tensor, _tokens_first)
LENGTH_FIRST = Layout(lambda tensor: tensor.transpose(1, 2).contiguous(), lambda tensor: tensor.flatten(0, 1))
PACKED = Layout(lambda tensor: _tokens_first(tensor).contiguous(), lambda tensor: tensor)
ONE_ROW = Layout(
    lambda tensor: _tokens_first(tensor).transpose(0, 1)[None].contiguous(), lambda tensor: tensor[0].transpose(0, 1)
)
"""All tokens as one entry of the batch."""


def padded(starts: list[int]) -> Layout:
    """Sequences with these starts, and an end, as entries of a batch, each with zeros up to the longest."""
    lengths = lengths_of(starts)
    entry = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(length) for length in lengths])

    def arrange(tensor: Tensor) -> Tensor:
        packed = _tokens_first(tensor)
        rows = packed.new_zeros(len(lengths), max(lengths), *packed.shape[1:])
        rows[entry.to(packed.device), place.to(packed.device)] = packed
        return rows.transpose(1, 2).contiguous()

    return Layout(
        arrange, lambda tensor: tensor.transpose(1, 2)[entry.to(tensor.device), place.to(tensor.device)].contiguous()
    )


class Contender(NamedTuple):
    """Attention of q, k and v in a layout, and further tensors that get gradients."""

    attend: Attend
    layout: Layout = HEADS_FIRST
    leaves: tuple[Tensor, ...] = ()


Maker = Callable[[Setting], Contender]


def random_tensors(setting: Setting) -> list[Tensor]:
    """q, k, v and the gradient of the output, the same for every contender."""
    generator = torch.Generator(setting.device).manual_seed(0)
    shape = tuple(setting.sizes)
    return [torch.randn(shape, device=setting.device, dtype=setting.dtype, generator=generator) for _ in range(4)]


def lengths_of(starts: list[int]) -> list[int]:
    """The lengths of sequences from their starts, the last of which is the end."""
    return [stop - start for start, stop in itertools.pairwise(starts)]


def document_starts(sizes: Sizes) -> list[int]:
    """Where documents of random lengths, a thousand tokens in the mean, begin in each row; with the row's end."""
    generator = torch.Generator().manual_seed(0)
    inner = torch.randint(1, max(2, sizes.length), (max(1, sizes.length // 1024),), generator=generator)
    return sorted({0, sizes.length, *(start for start in inner.tolist() if start < sizes.length)})


def document_ids(setting: Setting) -> Tensor:
    """The number of each token's document, which is the same in every entry of the batch: (length,)."""
    return _numbered(document_starts(setting.sizes), setting.device)


def documents_of_all(sizes: Sizes) -> list[int]:
    """The starts of the documents when the rows of the batch are laid one after another."""
    inner = document_starts(sizes)[:-1]
    return [row * sizes.length + start for row in range(sizes.batch) for start in inner] + [sizes.tokens]


def sequence_starts(sizes: Sizes, most: int = 8192) -> list[int]:
    """Where sequences of random lengths begin that add up to the tokens of the batch; with the end of the last."""
    generator = torch.Generator().manual_seed(0)
    starts = [0]
    while starts[-1] < sizes.tokens:
        length = int(torch.randint(1, min(most, sizes.length) + 1, (), generator=generator))
        starts.append(min(starts[-1] + length, sizes.tokens))
    return starts


def sequence_ids(setting: Setting) -> Tensor:
    """The number of each token's sequence: (tokens,)."""
    return _numbered(sequence_starts(setting.sizes), setting.device)


def _numbered(starts: list[int], device: torch.device) -> Tensor:
    numbers = torch.arange(len(starts) - 1, dtype=torch.int32)
    return torch.repeat_interleave(numbers, torch.tensor(lengths_of(starts))).to(device)


def as_starts(starts: list[int], device: torch.device) -> Tensor:
    """What functions for packed sequences take."""
    return torch.tensor(starts, dtype=torch.int32, device=device)


def alibi_slopes(setting: Setting) -> Tensor:
    """A slope for each head."""
    return torch.logspace(-1, -8, setting.sizes.heads, 2.0, device=setting.device)


def random_bias(setting: Setting, learned: bool) -> Tensor:
    """A bias for each head and pair."""
    sizes, generator = setting.sizes, torch.Generator(setting.device).manual_seed(1)
    shape = (sizes.heads, sizes.length, sizes.length)
    bias = torch.randn(shape, device=setting.device, dtype=setting.dtype, generator=generator)
    return bias.requires_grad_(learned)


def random_table(setting: Setting) -> Tensor:
    """A bias for each head and distance, in float32."""
    sizes, generator = setting.sizes, torch.Generator(setting.device).manual_seed(2)
    shape = (sizes.heads, 2 * sizes.length - 1)
    return torch.randn(shape, device=setting.device, generator=generator, requires_grad=True)


def random_sinks(setting: Setting) -> Tensor:
    """A logit for each head, in float32."""
    generator = torch.Generator(setting.device).manual_seed(3)
    return torch.randn(setting.sizes.heads, device=setting.device, generator=generator, requires_grad=True)
