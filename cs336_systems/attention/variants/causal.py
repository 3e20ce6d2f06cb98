"""No look into the future, as a mask that can be combined with others.

By itself ``attention(causal=...)`` is faster: it does not visit what is hidden.
"""

from ..rules import Mask
from .arguments import rows
from .recorded import recorded_mask

_causal = recorded_mask(lambda b, h, q_idx, kv_idx, shift: kv_idx <= q_idx + shift, int)


def causal(shift: int = 0) -> Mask:
    """Query i sees the keys up to i + shift; k_len - q_len aligns the last query with the last key."""
    return _causal(rows("shift", shift))
