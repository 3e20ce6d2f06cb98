"""Every so many keys (Child et al., "Generating long sequences with sparse transformers", 2019)."""

from ..rules import Mask
from .arguments import rows
from .recorded import recorded_mask

_dilated = recorded_mask(lambda b, h, q_idx, kv_idx, step: q_idx % step == kv_idx % step, int)


def dilated(step: int) -> Mask:
    """Query i sees the keys whose distance from it is a multiple of ``step``."""
    return _dilated(rows("step", step, 1))
