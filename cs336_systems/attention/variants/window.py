"""A sliding window, as a rule that can be combined with others (Beltagy et al., "Longformer", 2020).

By itself ``attention(window=...)`` is faster: it does not visit what is hidden.
"""

from ..rules import Mask, predicate
from .arguments import integer, rows


@predicate
def _window(batch, head, row, column, first, last):
    return (column >= row + first) & (column <= row + last)


def window(before: int, after: int = 0, shift: int = 0) -> Mask:
    """Query i sees the keys from i + shift - before to i + shift + after."""
    first = integer("shift", shift) - integer("before", before)
    return _window(rows("first", first), rows("last", shift + integer("after", after)))
