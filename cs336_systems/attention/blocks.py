"""Which blocks of pairs a mask leaves anything of: found once, so that kernels skip the rest and mask the edges."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.call import BLOCK, Options
from ..kernels.rules import Mask, leaves
from .captured import check_captured, size_along
from .pairs import Pairs, seen_pairs
from .sizes import Sizes
from .validation import Window, check_causal, check_window, window_sides

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
"""Of a block: no pair is visible, some are, all are."""


class Blocks(NamedTuple):
    """The visible blocks, `BLOCK` rows by `BLOCK` columns, of a mask, a causal mask and a window together.

    rows: (batch or 1, heads or 1, blocks of rows, 2 + blocks of columns) int32: for each block of rows how many blocks
    of columns are partly and how many are wholly visible, then their numbers, the partly visible first. columns: the
    same with rows and columns exchanged. The rest is what they were found for; batch and heads are None where the mask
    does not tell entries or heads apart.
    """

    rows: Tensor
    columns: Tensor
    q_len: int
    k_len: int
    window_left: int | None
    window_right: int | None
    bottom_right: bool
    batch: int | None
    heads: int | None


def find_blocks(
    mask: Mask,
    tensors: tuple[Tensor, ...],
    lengths: tuple[int, int],
    numbers: tuple[int | None, int | None],
    causal: bool | str,
    window: Window | None,
    device: torch.device | str | None,
) -> Blocks:
    """The blocks of a mask whose rules captured ``tensors``, found a row of blocks at a time.

    Args:
        mask: the expression.
        lengths: of q and k.
        numbers: of batch entries and heads; see `rules.Mask.with_blocks`.
    """
    q_len, k_len = lengths
    for name, value in (("q_len", q_len), ("k_len", k_len), ("batch", numbers[0]), ("heads", numbers[1])):
        if value is not None or "len" in name:
            _check_count(name, value)
    device = _device_of(tensors, device)
    sides = window_sides(check_causal(causal), check_window(window), q_len, k_len)
    options = Options(1.0, *sides, mask=mask)
    batch, heads = _told_apart(options, tensors, numbers, device)
    of_call = Sizes(((numbers[0] or 1) if batch is None else batch,), heads or numbers[1] or 1, q_len, k_len)
    check_captured("mask", leaves(mask), tensors, of_call, device)
    band, found = options.band(q_len, k_len), []
    for start in range(0, q_len, BLOCK):
        row = torch.arange(start, min(start + BLOCK, q_len), device=device)[:, None]
        pairs = _pairs(torch.arange(batch or 1), torch.arange(heads or 1), row, torch.arange(k_len), device)
        seen = seen_pairs(options, pairs, band, tensors)
        assert seen is not None
        seen = seen.expand(torch.broadcast_shapes(seen.shape, (1, 1, len(row), k_len)))
        some = F.pad(seen.any(-2), (0, -k_len % BLOCK)).unflatten(-1, (-1, BLOCK)).any(-1)
        every = F.pad(seen.all(-2), (0, -k_len % BLOCK)).unflatten(-1, (-1, BLOCK)).all(-1)
        found.append(some.to(torch.int32) + every.to(torch.int32))
    kinds = torch.stack(found, -2)
    return Blocks(_listed(kinds), _listed(kinds.mT), q_len, k_len, *sides, batch, heads)


def dense_mask(
    mask: Mask, tensors: tuple[Tensor, ...], shape: tuple[int, int, int, int], device: torch.device | str | None
) -> Tensor:
    """A mask whose rules captured ``tensors`` as a bool tensor (batch, heads, q_len, k_len)."""
    for name, value in zip(("batch", "heads", "q_len", "k_len"), shape, strict=True):
        _check_count(name, value)
    device = _device_of(tensors, device)
    batch, heads, q_len, k_len = shape
    check_captured("mask", leaves(mask), tensors, Sizes((batch,), heads, q_len, k_len), device)
    pairs = _pairs(torch.arange(batch), torch.arange(heads), torch.arange(q_len)[:, None], torch.arange(k_len), device)
    seen = seen_pairs(Options(1.0, mask=mask), pairs, (None, None), tensors)
    assert seen is not None
    return seen.expand(shape).contiguous()


def _device_of(tensors: tuple[Tensor, ...], device: torch.device | str | None) -> torch.device:
    if device is None:
        device = tensors[0].device if tensors else torch.get_default_device()
    return torch.empty(0, device=device).device  # "cuda" with its number


def _check_count(name: str, value: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {value!r} of type {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1; got {value}")


def _pairs(batch: Tensor, head: Tensor, row: Tensor, column: Tensor, device: torch.device) -> Pairs:
    batch, head = batch.to(device).view(-1, 1, 1, 1), head.to(device).view(-1, 1, 1)
    return Pairs(batch, head, row.to(device), column.to(device), head.numel())


def _told_apart(
    options: Options, tensors: tuple[Tensor, ...], numbers: tuple[int | None, int | None], device: torch.device
) -> tuple[int | None, int | None]:
    """How many batch entries and heads a mask tells apart; None where what it says does not depend on the number.

    What depends on a number has an axis for it, also where that number is 0 twice.
    """
    twice, first = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    seen = seen_pairs(options, _pairs(twice, twice, first, first[0], device), (None, None), tensors)
    assert seen is not None
    batch, heads, *_ = torch.broadcast_shapes(seen.shape, (1, 1, 1, 1))
    told: list[int | None] = [None, None]
    for place, (axis, name, size) in enumerate((("batch", "batch", batch), ("head", "heads", heads))):
        if size > 1:
            told[place] = numbers[place] or size_along(axis, leaves(options.mask), tensors)
            if told[place] is None:
                raise ValueError(
                    f"{name} must be given, because mask depends on it and captured no tensor with this axis; got None"
                )
    return told[0], told[1]


def _listed(kinds: Tensor) -> Tensor:
    order = torch.where(kinds == PARTIAL, 0, torch.where(kinds == WHOLE, 1, 2)).argsort(dim=-1, stable=True)
    counts = [(kinds == kind).sum(-1, keepdim=True) for kind in (PARTIAL, WHOLE)]
    return torch.cat([*counts, order], -1).to(torch.int32).contiguous()
