"""What becomes of pairs of a query and a key, on torch's tensors: what is visible, changed scores, dropped weights.

The same rules as the kernels', from the same source (see `cs336_systems.kernels.language`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.call import DROPOUT_BITS, PHILOX_ROUNDS, Aux, Band, Options
from ..kernels.language import NUMBERS
from ..kernels.lib.reductions import diagonal_sums, locate_rows
from ..kernels.mods import AXES, DISTANCE, code_of
from ..kernels.rules import OPERATORS, Leaf, Mask
from ..kernels.torch_names import exporting
from .op import NAMESPACE, library


class Pairs(NamedTuple):
    """Indices that broadcast to the scores (..., kv_heads, group, rows, columns) of some rows and columns.

    ``batch`` and ``head`` are numbers, row-major over the axes before the heads; without a head axis ``head`` is 0. Of
    packed sequences ``batch`` is the sequence's number, rows and columns count from where it begins, ``same`` says
    whether a pair is of one sequence, and ``shift`` how far a row's own column is from it.
    """

    batch: Tensor
    head: Tensor
    row: Tensor
    column: Tensor
    heads: int
    same: Tensor | None = None
    shift: Tensor | int = 0

    @classmethod
    def of(cls, options: Options, aux: Aux, q: Tensor, k: Tensor, rows: slice, columns: slice) -> Pairs:
        """The pairs of queries ``rows`` and keys ``columns`` of q (*batch, [heads,] q_len, d) and k."""
        pairs = cls.of_matrices(q, k, rows, columns)
        if aux.cu_seqlens_q is None or aux.cu_seqlens_k is None:
            return pairs
        return pairs.packed(options, aux.cu_seqlens_q, aux.cu_seqlens_k)

    def packed(self, options: Options, q_starts: Tensor, k_starts: Tensor) -> Pairs:
        """The same pairs of sequences that begin at these rows and columns."""
        q_sequence, row = locate_rows(q_starts, self.row)
        k_sequence, column = locate_rows(k_starts, self.column)
        last = q_starts.numel() - 2
        same = (q_sequence == k_sequence) & (q_sequence <= last)
        for place, most in ((row, options.max_seqlen_q), (column, options.max_seqlen_k)):
            if most is not None:
                same = same & (place < most)
        batch = q_sequence.clamp(max=last)
        shifts = k_starts.diff() - q_starts.diff()
        # Rules may be asked about other pairs too, and read what they captured there.
        row, column = (torch.where(same, place, 0) for place in (row, column))
        shift = shifts[batch] if options.bottom_right else 0
        return self._replace(batch=batch, row=row, column=column, same=same, shift=shift)

    @classmethod
    def of_matrices(cls, q: Tensor, k: Tensor, rows: slice, columns: slice) -> Pairs:
        """The pairs of rows and columns of matrices that are a sequence each."""
        device = q.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)
        if q.ndim < 4:
            # Where there is no head axis, the batch takes its place in the scores.
            batch = torch.arange(q.shape[0], device=device).view(-1, 1, 1, 1)
            return cls(batch, batch.new_zeros(()), row, column, 1)
        leading = q.shape[:-3]
        batch = torch.arange(math.prod(leading), device=device).view(*leading, 1, 1, 1, 1)
        head = torch.arange(q.shape[-3], device=device).view(max(1, k.shape[-3]), -1, 1, 1)
        return cls(batch, head, row, column, q.shape[-3])


def by_group(sinks: Tensor, k: Tensor) -> Tensor:
    """The sinks of all heads in a shape (kv_heads, group, 1) that broadcasts to rows of scores."""
    return sinks.view(max(1, k.shape[-3]) if k.ndim > 3 else 1, -1, 1)


def seen_pairs(options: Options, pairs: Pairs, band: Band, mask_aux: Sequence[Tensor]) -> Tensor | None:
    """Which pairs are visible, in a shape that broadcasts to the scores'; None if all are."""
    left, right = band
    seen = pairs.same
    if right is not None:
        before = pairs.column <= pairs.row + pairs.shift + right
        seen = before if seen is None else seen & before
    if left is not None:
        after = pairs.column >= pairs.row + pairs.shift + left
        seen = after if seen is None else seen & after
    if options.mask is not None:
        by_rules = _by_mask(options.mask, pairs, iter(mask_aux))
        seen = by_rules if seen is None else seen & by_rules
    return seen


def changed_scores(options: Options, scores: Tensor, pairs: Pairs, captured: Sequence[Tensor]) -> Tensor:
    """The scores as the rules leave them."""
    rest = iter(captured)
    for leaf in options.score_rules:
        function = code_of(leaf[0]).in_torch[torch.promote_types(scores.dtype, torch.float32)]
        changed = function(scores, pairs.batch, pairs.head, pairs.row, pairs.column, *_captured(leaf, rest))
        scores = changed.to(scores.dtype)
    return scores


class Term(NamedTuple):
    """d score / d element of a captured tensor: the tensor's number, its axes, and the term of each pair.

    ``origin`` is the index of distance 0 along an axis of distances.
    """

    number: int
    axes: tuple[str, ...]
    term: Tensor | float
    origin: int = 0

    def add_to(self, totals: dict[int, Tensor], dscores: Tensor, pairs: Pairs, rows: slice, columns: slice) -> None:
        """Add to the tensor's gradient what the score gradients of these pairs contribute."""
        total = totals[self.number]
        sizes = dict(zip(self.axes, total.shape, strict=True))
        part = dscores * self.term
        if pairs.same is not None:
            places = dict(zip(AXES, (pairs.batch, pairs.head, pairs.row, pairs.column), strict=True))
            places[DISTANCE] = pairs.column - pairs.row + self.origin
            index = [places[name] if size > 1 else torch.zeros_like(pairs.row) for name, size in sizes.items()]
            total.index_put_(tuple(torch.broadcast_tensors(*index, part[0])[:-1]), part[0], accumulate=True)
            return
        # (batch, heads, rows, columns), summed over the axes that the tensor is shared along or has not.
        part = part.flatten(-4, -3).flatten(0, -4) if part.ndim > 4 else part
        by_distance = sizes.get(DISTANCE, 1) > 1
        left = ("row", "column") if by_distance else ()
        shared = [axis for axis, name in enumerate(AXES) if sizes.get(name, 1) == 1 and name not in left]
        part = part.sum(shared, keepdim=True) if shared else part
        part = diagonal_sums(part) if by_distance else part
        first = columns.start - rows.stop + 1 + self.origin
        own = {"row": rows, "column": columns, DISTANCE: slice(first, first + part.shape[-1])}
        place = tuple(own.get(name, slice(None)) if size > 1 else slice(None) for name, size in sizes.items())
        target = total[place]
        target += part.reshape(target.shape)


def scores_and_slopes(
    options: Options, scores: Tensor, pairs: Pairs, captured: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor, Tensor | float, list[Term]]:
    """The scores as the rules leave them, their derivative, and terms for the captured tensors ``wanted``."""
    places, rest, first = (pairs.batch, pairs.head, pairs.row, pairs.column), iter(captured), 0
    steps = []
    wide = scores.dtype
    for leaf in options.score_rules:
        code, arguments = code_of(leaf[0]), (scores, *places, *_captured(leaf, rest))
        slots = [slot for slot, item in enumerate(leaf[1]) if item is None]
        asked = {slot: number for number, slot in enumerate(slots, first) if wanted[number]}
        first += len(slots)
        scores = code.in_torch[wide](*arguments)
        steps.append((leaf, code, arguments, asked))
    slope: Tensor | float = 1.0
    terms: list[Term] = []
    for leaf, code, arguments, asked in reversed(steps):
        for slot, number in asked.items():
            own = code.gradients[slot]
            factor = 1.0 if own.code is None else own.in_torch[wide](*arguments)
            terms.append(Term(number, own.axes, slope * factor, code.origin(slot, leaf[1])))
        if code.derivative is not None:
            slope = slope * code.derivative_in_torch[wide](*arguments)
    return scores, slope, terms


def kept_pairs(options: Options, pairs: Pairs, seed: Tensor) -> Tensor:
    """Whether dropout keeps the weight of each pair; the kernels draw the same numbers."""
    matrix = pairs.batch * pairs.heads + pairs.head
    # Inductor takes minutes for its rounds, and drew other numbers on a GPU (torch 2.11, Triton 3.9).
    opaque = torch.compiler.is_compiling() and not exporting()
    draw = torch.ops.cs336_systems.dropout_mask if opaque else _dropout_mask
    kept: Tensor = draw(seed, matrix, pairs.row, pairs.column, options.dropout_threshold)
    return kept


def _dropout_mask(seed: Tensor, matrix: Tensor, row: Tensor, column: Tensor, threshold: int) -> Tensor:
    number = philox(seed, column // 16 * 2 + column % 8 // 4, row, matrix, torch.zeros_like(row))
    first, second = (torch.where(column // 2 % 2 == 0, *words) for words in (number[:2], number[2:]))
    word = torch.where(column // 8 % 2 == 0, first, second)
    return (word >> column % 2 * 16) % 2**DROPOUT_BITS >= threshold


library.define(
    "dropout_mask(Tensor seed, Tensor matrix, Tensor row, Tensor column, int threshold) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("dropout_mask", _dropout_mask, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::dropout_mask", lib=library)  # type: ignore[untyped-decorator]
def _fake_dropout_mask(seed: Tensor, matrix: Tensor, row: Tensor, column: Tensor, threshold: int) -> Tensor:
    return torch.empty_like(matrix + row + column, dtype=torch.bool)


def _by_mask(mask: Mask, pairs: Pairs, rest: Iterator[Tensor]) -> Tensor:
    if mask[0] in OPERATORS:
        first, second = _by_mask(mask[1], pairs, rest), _by_mask(mask[2], pairs, rest)
        return first & second if mask[0] == "and" else first | second
    if mask[0] == "not":
        return ~_by_mask(mask[1], pairs, rest)
    function = code_of(mask[0]).in_torch[torch.float32]
    seen = function(pairs.batch, pairs.head, pairs.row, pairs.column, *_captured((mask[0], mask[1]), rest))
    return (torch.as_tensor(seen, device=pairs.row.device) if isinstance(seen, NUMBERS) else seen) != 0


def _captured(leaf: Leaf, rest: Iterator[Tensor]) -> list[float | Tensor]:
    return [next(rest) if item is None else item for item in leaf[1]]


_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: Tensor, *counter: Tensor, rounds: int = PHILOX_ROUNDS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32 (Salmon et al., 2011) of a counter of four 32-bit numbers: four others.

    ``seed`` is an int64 tensor of one element; its halves are the key.
    """
    low, high = seed.reshape(()) & _WORD, (seed.reshape(()) >> 32) & _WORD
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    for _ in range(rounds):
        first, second = _wide_product(c0, _MULTIPLIERS[0]), _wide_product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = second[0] ^ c1 ^ low, second[1], first[0] ^ c3 ^ high, first[1]
        low, high = (low + _INCREMENTS[0]) & _WORD, (high + _INCREMENTS[1]) & _WORD
    return c0, c1, c2, c3


def _wide_product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit numbers; ``factor`` is at least 2**31.

    x * factor may overflow an int64; x * (factor - 2**32) cannot, and differs from it by x in the upper bits.
    """
    product = x * (factor - 2**32)
    return (product >> 32) + x, product & _WORD
