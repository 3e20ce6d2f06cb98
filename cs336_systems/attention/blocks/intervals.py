"""Bounds of what a mask's rules compute for all pairs of a block: interval arithmetic (Moore, 1966) on integers.

A rule runs on `Interval`s in place of tensors. Bounds of integers and truth values go through sums, comparisons,
and products and quotients with a number. Of everything else nothing is known, which is always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.call import Band, Options
from ..pairs import Pairs, seen_pairs

_LARGEST = 2**29
"""Integers up to here are added: their sums fit 32 bits."""


class Interval:
    """``low`` <= x <= ``high`` for all x of a block, False being below True; both None where nothing is known.

    Attributes:
        low, high: tensors, with an element for each block, or numbers.
        numbers: of an index of the pairs, all that it stands for: (..., elements of a block), or (..., 1).
    """

    def __init__(self, low: Any, high: Any, numbers: Tensor | None = None) -> None:
        self.low, self.high, self.numbers = low, high, numbers

    @property
    def device(self) -> torch.device:
        """That of bounds that are tensors."""
        device: torch.device = self.low.device
        return device

    def is_floating_point(self) -> bool:
        """False: of floating-point numbers nothing is known."""
        return False

    def to(self, dtype: torch.dtype) -> Interval:
        """The same integers in a dtype that holds them."""
        return self + 0 if dtype is torch.int64 else UNKNOWN

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Interval:
        return UNKNOWN

    def _unknown(self, *others: Any) -> Interval:
        return UNKNOWN

    __truediv__ = __rtruediv__ = __rfloordiv__ = __mod__ = __rmod__ = __xor__ = __rxor__ = _unknown
    __lshift__ = __rlshift__ = __rrshift__ = _unknown

    def __add__(self, other: Any) -> Interval:
        if self.numbers is not None and isinstance(other, int) and other == 0:
            return self
        other = _interval(other)
        if not (_can_be_added(self) and _can_be_added(other)):
            return UNKNOWN
        return Interval(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low) if _can_be_added(self) else UNKNOWN

    def __sub__(self, other: Any) -> Interval:
        return self + -_interval(other)

    def __rsub__(self, other: Any) -> Interval:
        return -self + other

    def __mul__(self, other: Any) -> Interval:
        by_number = isinstance(other, int) and not isinstance(other, bool)
        if not by_number or not _are_within(self, _LARGEST // max(1, abs(other))):
            return UNKNOWN
        ends = self.low * other, self.high * other
        return Interval(*(ends if other >= 0 else ends[::-1]))

    def __floordiv__(self, other: Any) -> Interval:
        by_number = isinstance(other, int) and 0 < other <= _LARGEST
        return Interval(self.low // other, self.high // other) if by_number and _can_be_added(self) else UNKNOWN

    def __rshift__(self, other: Any) -> Interval:
        return self // 2**other if isinstance(other, int) and other >= 0 else UNKNOWN

    def __lt__(self, other: Any) -> Interval:
        other = _interval(other)
        if not (_is_known(self) and _is_known(other)):
            return EITHER
        return Interval(self.high < other.low, self.low < other.high)

    def __gt__(self, other: Any) -> Interval:
        return _interval(other) < self

    def __le__(self, other: Any) -> Interval:
        return ~(self > other)

    def __ge__(self, other: Any) -> Interval:
        return ~(self < other)

    def __eq__(self, other: Any) -> Interval:  # type: ignore[override]
        return (self <= other) & (self >= other)

    def __ne__(self, other: Any) -> Interval:  # type: ignore[override]
        return ~(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __invert__(self) -> Interval:
        return Interval(self.high == 0, self.low == 0) if _is_truth(self) else UNKNOWN

    def __and__(self, other: Any) -> Interval:
        other = _interval(other)
        known = _is_truth(self) and _is_truth(other)
        return Interval(self.low & other.low, self.high & other.high) if known else UNKNOWN

    def __or__(self, other: Any) -> Interval:
        other = _interval(other)
        known = _is_truth(self) and _is_truth(other)
        return Interval(self.low | other.low, self.high | other.high) if known else UNKNOWN

    __radd__, __rmul__, __rand__, __ror__ = __add__, __mul__, __and__, __or__


UNKNOWN, EITHER = Interval(None, None), Interval(False, True)


class Captured:
    """A captured tensor as rules read it for all pairs of a block."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tensor.shape

    def __getitem__(self, places: tuple[Interval | Tensor | int, ...]) -> Interval:
        """The bounds of the elements at these indices; unknown where they differ along rows and along columns."""
        index = [place.numbers if isinstance(place, Interval) else place for place in places]
        along = [x for x in index if isinstance(x, Tensor) and x.shape[-1] > 1]
        has_order = not (self.tensor.is_floating_point() or self.tensor.is_complex())
        if not has_order or len(along) > 1 or any(x is None for x in index):
            return UNKNOWN
        elements = self.tensor[tuple(index)]
        return Interval(elements.amin(-1), elements.amax(-1))


def bounds_of(options: Options, pairs: Pairs, band: Band, mask_aux: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Whether all, and whether some pairs of each block may be visible, in shapes that broadcast to the blocks'.

    The first is certain where it is True, the second where it is False.

    Args:
        pairs: indices in shapes that broadcast to (entries, heads, blocks of rows, blocks of columns, elements), those
            of a block's rows and columns ascending along the last axis.
    """
    batch, head, row, column = (Interval(x[..., 0], x[..., -1], x) for x in pairs[:4])
    places: tuple[Any, Any, Any, Any] = batch, head, row, column
    shift: Any = Interval(pairs.shift[..., 0], pairs.shift[..., 0]) if isinstance(pairs.shift, Tensor) else pairs.shift
    captured: Any = [Captured(x) for x in mask_aux]
    seen: Any = seen_pairs(options, Pairs(*places, 1, shift=shift), band, captured)
    if isinstance(seen, Tensor):  # a constant
        return seen, seen
    every, some = (seen.low, seen.high) if _is_known(seen) else (False, True)
    return torch.as_tensor(every, device=pairs.row.device), torch.as_tensor(some, device=pairs.row.device)


def _interval(value: Any) -> Interval:
    if isinstance(value, Interval):
        return value
    return Interval(value, value) if isinstance(value, int) else UNKNOWN


def _is_known(value: Interval) -> bool:
    return value.low is not None


def _is_truth(value: Interval) -> bool:
    return all(
        isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype is torch.bool) for x in (value.low, value.high)
    )


def _can_be_added(value: Interval) -> bool:
    """Whether integers are so small that sums of two do not overflow. Asking tensors waits for the device."""
    return value.numbers is not None or _are_within(value, _LARGEST)  # pairs have fewer indices


def _are_within(value: Interval, most: int) -> bool:
    """Whether they are integers from -most to most; torch adds those of 8 and 16 bits and truth values differently."""
    for x in (value.low, value.high):
        if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64):
            if ((x < -most) | (x > most)).any():
                return False
        elif isinstance(x, bool) or not isinstance(x, int) or abs(x) > most:
            return False
    return True
