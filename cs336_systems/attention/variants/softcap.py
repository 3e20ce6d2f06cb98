"""Logit soft-capping: scores bounded smoothly (Gemma Team, "Gemma 2", 2024)."""

import math

from ...kernels.mods import SOFTCAP
from ..rules import Scores


def softcap(cap: float) -> Scores:
    """cap * tanh(score / cap)."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise TypeError(f"cap must be a number; got {cap!r} of type {type(cap).__name__}")
    if not 0 < cap < math.inf:
        raise ValueError(f"cap must be above 0 and finite; got {cap}")
    return Scores(((SOFTCAP, (float(cap),)),), ())
