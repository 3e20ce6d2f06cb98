"""Every so many keys (Child et al., "Generating long sequences with sparse transformers", 2019)."""

from ..rules import Mask
from .arguments import rows
from .recorded import mask_of_divisor

_dilated = mask_of_divisor(lambda b, h, q_idx, kv_idx, step: q_idx % step == kv_idx % step)


def dilated(step: int) -> Mask:
    """Query i sees the keys whose distance from it is a multiple of ``step``."""
    return _dilated(rows("step", step, 1))
