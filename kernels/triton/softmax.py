"""The online softmax, in base 2, and its derivative.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), as FlashAttention uses it: a running maximum
and a running total per row, with what was accumulated before rescaled whenever the maximum moves.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .units import exponent_of, power_of_two

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
ABOVE: tl.constexpr = tl.constexpr(1.0 + 2.0**-23)
BELOW: tl.constexpr = tl.constexpr(1.0 - 2.0**-23)


HUGE: tl.constexpr = tl.constexpr(2.0**28)
"""Scores from which rounding the largest one could make all weights 0; those next to it have a weight below 2**-8."""

LARGE: tl.constexpr = tl.constexpr(2.0**10)
"""Log-sum-exps from which their rounding makes weights wrong by 1e-4 and more."""
SLACK: tl.constexpr = tl.constexpr(2.0**-21)
"""The share of itself by which such a one is `lowered`: 4 * 2**-23, where all that rounds adds up to 3.6 * 2**-23."""


class Softmax(NamedTuple):
    """Per row: the largest score so far, and the sum of exp2(score - that maximum + shift).

    product: the largest of a key, before its scale.
    """

    maximum: tl.tensor
    total: tl.tensor
    product: tl.tensor


@triton.jit
def softmax_start(ROWS: tl.constexpr, sinks, head, SHIFT: tl.constexpr):
    """No score seen yet but that of the head's sink, if there are sinks: a key that every row sees, without a value."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        maximum = tl.full([ROWS], 0.0, tl.float32) + sink
        total += tl.where(sink == float("-inf"), 0.0, 2.0**SHIFT)
    return Softmax(maximum, total, tl.full([ROWS], float("-inf"), tl.float32))


@triton.jit
def softmax_step(state, products, scale, SHIFT: tl.constexpr, FUSED: tl.constexpr):
    """Take in a tile of scores ``products * scale``: the new state, the tile's weights, and the factor for older ones.

    ``scale`` is positive and includes log2(e). Hidden products are -inf. A row that has seen nothing keeps a maximum of
    -inf; its pivot is 0, because -inf - -inf would be NaN. Weights are 2**SHIFT times too large, which costs nothing:
    it keeps small ones out of float16's subnormal numbers, and sums of bfloat16's largest values finite. FUSED says
    whether multiplications and additions are.
    """
    product = tl.maximum(state.product, tl.max(products, 1))
    largest = product * scale
    if FUSED:
        # A fused multiply-add does not round products * scale as the line above does: for scores in the millions the
        # exponent below could exceed SHIFT by enough for a float16 weight to be infinite.
        largest *= tl.where(largest > 0.0, ABOVE, BELOW)
    maximum = tl.maximum(state.maximum, largest)
    pivot = tl.where(maximum == float("-inf"), 0.0, maximum)
    rescale = tl.exp2(state.maximum - pivot)
    if FUSED:
        # By a power of two the largest product is multiplied exactly, so that its own weight is 1. The others' weights
        # are then too large, but next to nothing.
        size = tl.abs(largest)
        huge = (size >= HUGE) & (size < float("inf")) & (largest == maximum)
        coarse = power_of_two(exponent_of(scale))
        factor = tl.where(huge, coarse, scale)
        offset = tl.where(huge, product * coarse, pivot - SHIFT)
        rescale = tl.where(huge, tl.exp2((state.product - product) * coarse), rescale)
        weights = tl.exp2(products * factor[:, None] - offset[:, None])
    else:
        # In this order the largest score gives SHIFT exactly, however large it is.
        weights = tl.exp2((products * scale - pivot[:, None]) + SHIFT)
    return Softmax(maximum, state.total * rescale + tl.sum(weights, 1), product), weights, rescale


@triton.jit
def softmax_finish(state, SHIFT: tl.constexpr):
    """The factor that normalises what was accumulated, and the natural log-sum-exp: 0 and -inf for unseeing rows."""
    blind = state.total == 0.0
    total = tl.where(blind, 1.0, state.total)
    # The shift is undone in the total, where that is exact; the maximum may be too small to take it without rounding.
    lse = state.maximum * LN_2 + tl.log(total * 2.0**-SHIFT)
    # A score of +inf makes the weights NaN, of which the log-sum-exp, unlike the output, needs none.
    lse = tl.where(state.maximum == float("inf"), float("inf"), lse)
    return tl.where(blind, 0.0, 1.0 / total), tl.where(blind, float("-inf"), lse)


@triton.jit
def lowered(lse):
    """Natural log-sum-exps, those that are large so far below that no weight of 1 comes out smaller.

    They are rounded, in base e and again in base 2, and scores are added up in another order than before. For scores in
    the millions such differences are whole numbers. `weights_again` limits the weights that are then too large.
    """
    # A factor, because an infinity less its share is no number.
    return lse * tl.where(tl.abs(lse) < LARGE, 1.0, tl.where(lse > 0.0, 1.0 - SLACK, 1.0 + SLACK))


@triton.jit
def weights_again(products, scale, lse, SHIFT: tl.constexpr):
    """2**SHIFT times the probabilities of scores ``products * scale``; the natural log-sum-exp ``lse`` broadcasts."""
    exponent = products * scale - (lse * LOG2_E - SHIFT)
    # Probabilities are at most 1, but rounding the log-sum-exp of huge scores could make them infinite.
    return tl.exp2(tl.minimum(exponent, SHIFT, propagate_nan=tl.PropagateNan.ALL))
