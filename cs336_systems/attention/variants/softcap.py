"""Logit soft-capping: scores bounded smoothly (Gemma Team, "Gemma 2", 2024)."""

import math

from ...kernels.language import tanh
from ..rules import Scores, score_rule


@score_rule
def _softcap(score, batch, head, row, column, cap):
    return cap * tanh(score / cap)


@_softcap.derivative
def _softcap_slope(score, batch, head, row, column, cap):
    ratio = tanh(score / cap)
    return 1.0 - ratio * ratio


def softcap(cap: float) -> Scores:
    """cap * tanh(score / cap)."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise TypeError(f"cap must be a number; got {cap!r} of type {type(cap).__name__}")
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be above 0 and finite; got {cap}")
    return _softcap(float(cap))
