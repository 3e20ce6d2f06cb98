"""A sliding window, as a rule that can be combined with others (Beltagy et al., "Longformer", 2020).

By itself ``attention(window=...)`` is faster: it does not visit what is hidden.
"""

from ..rules import Mask, predicate
from .arguments import integer


@predicate
def _window(batch, head, row, column, before, after, shift):
    return (column >= row + shift - before) & (column <= row + shift + after)


def window(before: int, after: int = 0, shift: int = 0) -> Mask:
    """Query i sees the keys from i + shift - before to i + shift + after."""
    return _window(integer("before", before), integer("after", after), integer("shift", shift))
