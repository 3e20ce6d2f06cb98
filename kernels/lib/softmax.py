"""What every backend's softmax shares: the base, and how the backward reads a large log-sum-exp."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""log2(e): kernels compute exponentials in base 2."""

LARGE: tl.constexpr = tl.constexpr(2.0**10)
"""Log-sum-exps from which on rounding changes probabilities by 1e-4 and more."""
SLACK: tl.constexpr = tl.constexpr(2.0**-21)
"""How far `lowered` lowers those, relatively: 4 * 2**-23, where all roundings add up to 3.6 * 2**-23."""


@triton.jit
def lowered(lse):
    """Natural log-sum-exps, lowered where they are large, so that no probability of 1 is recomputed as less.

    They are rounded in base e and again in base 2, and scores are summed in another order than in the forward. For
    scores in the millions these differences are whole numbers. Probabilities then exceed 1; the caller clamps them.
    """
    # A factor, because an infinity minus its share is NaN.
    return lse * tl.where(tl.abs(lse) < LARGE, 1.0, tl.where(lse > 0.0, 1.0 - SLACK, 1.0 + SLACK))
