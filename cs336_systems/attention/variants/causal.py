"""No look into the future, as a rule that can be combined with others.

By itself ``attention(causal=...)`` is faster: it does not visit what is hidden.
"""

from ..rules import Mask, predicate
from .arguments import rows


@predicate
def _causal(batch, head, row, column, shift):
    return column <= row + shift


def causal(shift: int = 0) -> Mask:
    """Query i sees the keys up to i + shift; k_len - q_len aligns the last query with the last key."""
    return _causal(rows("shift", shift))
