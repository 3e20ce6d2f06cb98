"""A sliding window, as a mask that can be combined with others (Beltagy et al., "Longformer", 2020).

By itself ``attention(window=...)`` is faster: it does not visit what is hidden.
"""

from ..rules import Mask
from .arguments import integer, rows
from .recorded import recorded_mask

_window = recorded_mask(
    lambda b, h, q_idx, kv_idx, first, last: (kv_idx >= q_idx + first) & (kv_idx <= q_idx + last), int, int
)


def window(before: int, after: int = 0, shift: int = 0) -> Mask:
    """Query i sees the keys from i + shift - before to i + shift + after."""
    first = integer("shift", shift) - integer("before", before)
    return _window(rows("first", first), rows("last", shift + integer("after", after)))
