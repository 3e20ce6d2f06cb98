"""Which blocks of pairs a mask leaves anything of: found once, so that kernels skip the rest and mask the edges."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.call import BLOCK, Band, Options
from ...kernels.rules import Mask, leaves
from ..captured import check_captured, size_along
from ..pairs import Pairs, seen_pairs
from ..sizes import Sizes
from ..validation import (
    Window,
    check_causal,
    check_starts,
    check_starts_match,
    check_window,
    lengths_of,
    window_sides,
)
from .content_cache import ContentCache, content_of, usable_in
from .intervals import bounds_of

HIDDEN, PARTIAL, WHOLE = 0, 1, 2
"""Of a block: no pair is visible, some are, all are."""
PAIRS_AT_ONCE = {"cpu": 2**19, "other": 2**22}
"""How many pairs rules are computed for at a time, by the type of the device: 8 bytes each, several times."""
BLOCKS_AT_ONCE = 2**17
"""How many blocks, or elements of captured tensors, bounds are computed for at a time; at least those of one head."""


Starts = tuple[Tensor, Tensor]
"""cu_seqlens_q and cu_seqlens_k."""


class Blocks(NamedTuple):
    """The visible blocks, `BLOCK` rows by `BLOCK` columns, of a mask, a causal mask and a window together.

    rows: (batch or 1, heads or 1, blocks of rows, blocks of columns + 3) int32: for each block of rows how many
    blocks of columns are partly and how many are wholly visible, then their numbers, the partly visible first, both
    from the last to the first: with most causal masks each row then sees something, itself, in the first block that is
    visited. The last element of the i-th list is the number of the block of rows with the i-th longest list.
    columns: the same with rows and columns exchanged, and from the first to the last. The rest is what they were found
    for; batch and heads are None where the mask does not tell entries or heads apart. Packed sequences are entries of
    the batch, with q_len and k_len the bounds of their lengths; starts is None without them.
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
    starts: Starts | None


cache: ContentCache[Blocks] = ContentCache(8)
"""Lists found by ``with_blocks(cache=True)``."""


def find_blocks(
    mask: Mask,
    tensors: tuple[Tensor, ...],
    lengths: tuple[int, int],
    numbers: tuple[int | None, int | None],
    causal: bool | str,
    window: Window | None,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    given_device: torch.device | str | None,
    by_content: bool,
) -> Blocks:
    """The blocks of a mask whose rules captured ``tensors``, found for many entries and heads at a time.

    Args:
        mask: the expression.
        lengths: of q and k.
        numbers: of batch entries and heads; see `rules.Mask.with_blocks`.
        by_content: whether `cache` may have them.
    """
    q_len, k_len = lengths
    for name, value in (("q_len", q_len), ("k_len", k_len), ("batch", numbers[0]), ("heads", numbers[1])):
        if value is not None or "len" in name:
            _check_count(name, value)
    q_starts, k_starts = cu_seqlens
    if q_starts is None and k_starts is not None:
        raise ValueError("cu_seqlens_q must be given with cu_seqlens_k; got None")
    starts = None if q_starts is None else (q_starts, q_starts if k_starts is None else k_starts)
    device = _device_of(tensors if starts is None else (*tensors, starts[0]), given_device)
    for name, each in zip("qk", starts or (), strict=False):
        check_starts(name, each, device, "the mask")
    sides = window_sides(check_causal(causal), check_window(window), q_len, k_len)
    options = Options(1.0, *sides, mask=mask)

    def find() -> Blocks:
        return _find(options, tensors, lengths, numbers, starts, device)

    if not by_content:
        return find()
    # As text, because 1, 1.0 and True are equal.
    return cache.get(
        (repr(options), lengths, numbers, usable_in(device), content_of((*tensors, *(starts or ())))), find
    )


def _find(
    options: Options,
    tensors: tuple[Tensor, ...],
    lengths: tuple[int, int],
    numbers: tuple[int | None, int | None],
    starts: Starts | None,
    device: torch.device,
) -> Blocks:
    q_len, k_len = lengths
    batch, heads = _told_apart(options, tensors, numbers if starts is None else (1, numbers[1]), device)
    of_entries = [lengths]
    if starts is not None:
        check_starts_match(*starts)
        of_each = (lengths_of(name, each, most) for name, each, most in zip("qk", starts, lengths, strict=True))
        of_entries = [*zip(*of_each, strict=True)]
        batch = len(of_entries)
        if numbers[0] not in (None, batch):
            raise ValueError(f"batch must be {batch}, the sequences of cu_seqlens_q; got {numbers[0]}")
    of_call = Sizes(((numbers[0] or 1) if batch is None else batch,), heads or numbers[1] or 1, q_len, k_len)
    check_captured("mask", leaves(options.mask), tensors, of_call, device)
    if device.type == "meta":
        raise ValueError("device must be one whose tensors have values, to find blocks from; got meta")
    of_rows, of_columns = -(-q_len // BLOCK), -(-k_len // BLOCK)
    shapes = ((batch or 1, heads or 1, own, other + 3) for own, other in ((of_rows, of_columns), (of_columns, of_rows)))
    rows, columns = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes)
    band, of_lengths = options.band(*lengths, packed=starts is not None), torch.tensor(of_entries)
    at_once = max(1, BLOCKS_AT_ONCE // max(of_rows * of_columns, BLOCK * max(of_rows, of_columns)))
    numbered = torch.arange(batch or 1) if starts is None else of_lengths.all(-1).nonzero().flatten()
    for head in torch.arange(heads or 1, device=device).split(at_once):
        for entry in numbered.split(max(1, at_once // len(head))) if len(numbered) else ():
            own = of_lengths if starts is None else of_lengths[entry]
            pairs, most = _elements(entry.to(device), head, own, starts is not None and options.bottom_right, device)
            kinds = _kinds(options, tensors, pairs, band, most)
            kinds = F.pad(kinds, (0, of_columns - kinds.shape[-1], 0, of_rows - kinds.shape[-2]), value=HIDDEN)
            place = entry.to(device)[:, None], head
            rows[place], columns[place] = _listed(kinds, step=-1), _listed(kinds.mT.contiguous(), step=1)
    sides = options.window_left, options.window_right, options.bottom_right
    kept = None if starts is None else (starts[0].clone(), starts[1].clone())
    return Blocks(rows, columns, q_len, k_len, *sides, batch, heads, kept)


def _elements(
    entry: Tensor, head: Tensor, lengths: Tensor, shifted: bool, device: torch.device
) -> tuple[Pairs, Tensor]:
    """The elements of blocks as `bounds_of` takes them, and what of each block is visible at most.

    Args:
        lengths: those of each entry, (entries, 2), or of all, (1, 2); on the CPU.
        shifted: whether the band is relative to each entry's last diagonal.
    """
    reach: list[int] = lengths.amax(0).tolist()
    row, column = (torch.arange(-(-x // BLOCK) * BLOCK, device=device).view(-1, BLOCK) for x in reach)
    q_len, k_len = lengths.to(device)[..., None, None].unbind(1)
    of_rows = (row[:, :1] < q_len).to(torch.uint8)
    # Of the last block at most a part, so that kernels look which columns exist.
    most = of_rows * ((column[:, 0] < k_len).to(torch.uint8) + (column[:, -1] < k_len).to(torch.uint8))
    # Elements past the end are the last one again, which changes no bound and nothing that some or all pairs are.
    rows, columns = torch.minimum(row, q_len - 1)[:, None, :, None], torch.minimum(column, k_len - 1)[:, None, None]
    shift = (k_len - q_len)[..., None, None] if shifted else 0
    return Pairs(entry.view(-1, 1, 1, 1, 1), head.view(-1, 1, 1, 1), rows, columns, 1, shift=shift), most[:, None]


def _kinds(options: Options, tensors: tuple[Tensor, ...], pairs: Pairs, band: Band, most: Tensor) -> Tensor:
    """(entries, heads, blocks of rows, blocks of columns) uint8: what is visible of each block.

    Rules are computed for bounds first, and for all pairs of the blocks that these leave undecided.
    """
    shape = torch.broadcast_shapes(*[x.shape[:-1] for x in pairs[:4]])
    every, some = bounds_of(options, pairs, band, tensors)
    undecided = (some & ~every & (most > 0)).expand(shape).nonzero(as_tuple=True)
    kinds = (every.to(torch.uint8) + some.to(torch.uint8)).expand(shape).contiguous()
    at_once = max(1, PAIRS_AT_ONCE["cpu" if kinds.device.type == "cpu" else "other"] // BLOCK**2)
    for blocks in zip(*[x.split(at_once) for x in undecided], strict=True):
        batch, head, row, column = (x.expand(*shape, -1)[blocks][..., None] for x in pairs[:4])
        shift = pairs.shift if isinstance(pairs.shift, int) else pairs.shift.expand(*shape, -1)[blocks][..., None]
        exact = seen_pairs(options, Pairs(batch, head, row, column.mT, 1, shift=shift), band, tensors)
        assert exact is not None
        # Of bytes, because torch's any and all are many times slower on a CPU.
        exact = exact.expand(len(row), BLOCK, BLOCK).contiguous().view(torch.uint8)
        kinds[blocks] = exact.amax(-2).amax(-1) + exact.amin(-2).amin(-1)
    return torch.minimum(kinds, most)


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
        device = next((x.device for x in tensors if isinstance(x, Tensor)), torch.get_default_device())
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


def _listed(kinds: Tensor, step: int) -> Tensor:
    after = (kinds.int() + (3 - PARTIAL)) % 3  # partly visible, wholly visible, hidden
    partial, whole = ((kinds == kind).sum(-1) for kind in (PARTIAL, WHOLE))
    most_first = _sorted(-partial - whole, step)[..., None]
    return torch.cat([partial[..., None], whole[..., None], _sorted(after, step), most_first], -1).int()


def _sorted(keys: Tensor, step: int) -> Tensor:
    """The places of keys in ascending order; of equal ones the first comes first, with a step of -1 the last."""
    count = keys.shape[-1]
    return (keys * count + step * torch.arange(count, device=keys.device)).argsort(dim=-1)
