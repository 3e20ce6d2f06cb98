"""The online softmax in base 2, and probabilities recomputed from the log-sum-exp.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), as in FlashAttention: a running maximum and
sum per row; what was accumulated is rescaled when the maximum grows.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...lib.softmax import LOG2_E
from .pow2 import exponent_of, power_of_two

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ABOVE: tl.constexpr = tl.constexpr(1.0 + 2.0**-23)
BELOW: tl.constexpr = tl.constexpr(1.0 - 2.0**-23)
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)
"""Replaces a scale of 0: it makes all scores equal too, and -inf times it stays -inf."""
HUGE: tl.constexpr = tl.constexpr(2.0**28)
"""Scores from which on rounding the maximum could make all p 0; the scores next to it have a p below 2**-8."""


class Softmax(NamedTuple):
    """Per row: the running maximum, and the sum of exp2(score - maximum + SHIFT).

    raw_maximum: the largest score before its scale.
    """

    maximum: tl.tensor
    total: tl.tensor
    raw_maximum: tl.tensor


@triton.jit
def softmax_start(ROWS: tl.constexpr, sinks, head, SHIFT: tl.constexpr):
    """The state before any key. A sink, if there are sinks, is a key without a value that every row sees."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        maximum = tl.full([ROWS], 0.0, tl.float32) + sink
        total += tl.where(sink == float("-inf"), 0.0, 2.0**SHIFT)
    return Softmax(maximum, total, tl.full([ROWS], float("-inf"), tl.float32))


@triton.jit
def softmax_step(state, s, scale, SHIFT: tl.constexpr, FUSED: tl.constexpr):
    """Add a tile of scores ``s * scale``: the new state, the tile's p, and the factor for what was accumulated.

    ``scale`` is positive and includes log2(e). Hidden scores are -inf. A row that has seen nothing keeps a maximum of
    -inf; its pivot is 0, because -inf - -inf is NaN. p is 2**SHIFT times too large, at no cost: small p stay out of
    float16's subnormal numbers, and sums of bfloat16's largest values stay finite. FUSED: multiplications and additions
    are fused.
    """
    raw_maximum = tl.maximum(state.raw_maximum, tl.max(s, 1))
    largest = raw_maximum * scale
    if FUSED:
        # A fused multiply-add does not round s * scale as the line above does: for scores in the millions the exponent
        # below could exceed SHIFT by enough for a float16 p to be infinite.
        largest *= tl.where(largest > 0.0, ABOVE, BELOW)
    maximum = tl.maximum(state.maximum, largest)
    pivot = tl.where(maximum == float("-inf"), 0.0, maximum)
    rescale = tl.exp2(state.maximum - pivot)
    if FUSED:
        # A power of two multiplies the largest score exactly, so that its p is 1. The other p are then too large, but
        # almost 0.
        size = tl.abs(largest)
        huge = (size >= HUGE) & (size < float("inf")) & (largest == maximum)
        coarse = power_of_two(exponent_of(scale))
        factor = tl.where(huge, coarse, scale)
        offset = tl.where(huge, raw_maximum * coarse, pivot - SHIFT)
        rescale = tl.where(huge, tl.exp2((state.raw_maximum - raw_maximum) * coarse), rescale)
        p = tl.exp2(s * factor[:, None] - offset[:, None])
    else:
        # In this order the largest score gives SHIFT exactly, however large it is.
        p = tl.exp2((s * scale - pivot[:, None]) + SHIFT)
    return Softmax(maximum, state.total * rescale + tl.sum(p, 1), raw_maximum), p, rescale


@triton.jit
def softmax_finish(state, SHIFT: tl.constexpr):
    """The factor that normalises the accumulator, and the natural log-sum-exp; 0 and -inf for rows that see no key."""
    blind = state.total == 0.0
    total = tl.where(blind, 1.0, state.total)
    # The shift is undone in the total, where that is exact; subtracting it from a maximum could round.
    lse = state.maximum * LN_2 + tl.log(total * 2.0**-SHIFT)
    # A score of +inf makes p NaN, and with it the output, but not the log-sum-exp.
    lse = tl.where(state.maximum == float("inf"), float("inf"), lse)
    return tl.where(blind, 0.0, 1.0 / total), tl.where(blind, float("-inf"), lse)


@triton.jit
def recompute_p(s, scale, lse, SHIFT: tl.constexpr):
    """2**SHIFT * p of scores ``s * scale``, at most 2**SHIFT; the natural log-sum-exp ``lse`` broadcasts."""
    exponent = s * scale - (lse * LOG2_E - SHIFT)
    # Rounding the log-sum-exp of huge scores could make p infinite.
    return tl.exp2(tl.minimum(exponent, SHIFT, propagate_nan=tl.PropagateNan.ALL))
