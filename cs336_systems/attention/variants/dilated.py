"""Every so many keys (Child et al., "Generating long sequences with sparse transformers", 2019)."""

from ..rules import Mask, predicate
from .arguments import rows


@predicate
def _dilated(batch, head, row, column, step):
    # Lengths do not reach 2**30, and a remainder of a negative number would not be the same everywhere.
    return (row + (1 << 30) // step * step - column) % step == 0


def dilated(step: int) -> Mask:
    """Query i sees the keys whose distance from it is a multiple of ``step``."""
    return _dilated(rows("step", step, 1))
