"""What the passes of the backward share: weights again, the gradients of scores, and sums of what rules captured.

FlashAttention-2 (Dao, 2023) without atomics: one pass gathers dQ, another dK and dV, both deterministic. Both recompute
the probabilities from q, k and the saved log-sum-exp. Two more products than the single pass with atomic additions, and
in exchange the same bits on every run, and no float32 buffer for dQ. Each pass also sums up what it sees of the
gradients of tensors that score rules captured; those with an element for each pair have a pass of their own.
"""

import triton
import triton.language as tl

from .pairs import existing, seen_pairs
from .softmax import LOG2_E, weights_again


@triton.jit
def score_gradient(weights, products, delta, scales):
    """d loss / d score in its unit: weight * (dp - delta), where delta is each row's sum of weight * dp."""
    return weights * (products * scales.dp - delta * scales.delta)


@triton.jit
def weights_and_slopes(
    products, rows, columns, lse, scales, place,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASKED: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
    SHIFT: tl.constexpr, CHECK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile's weights, d score / d product of q and k (but for the scale), and d score / d what rules captured."""
    exists = existing(rows, columns, place, CHECK_COLUMNS)
    slopes = 1.0
    terms = ()
    if SCORE is not None:
        scores, slopes, terms = SCORE(
            products * scales.natural, place.batch, place.head, rows, columns, exists, place.captured[1]
        )
        weights = weights_again(scores, LOG2_E, lse, SHIFT)
    else:
        weights = weights_again(products, scales.score, lse, SHIFT)
    if MASKED:
        weights = tl.where(seen_pairs(rows, columns, exists, place, LEFT, RIGHT, MASK), weights, 0.0)
    return weights, slopes, terms


@triton.jit
def added_up(sums, gradient, terms, CHOSEN: tl.constexpr, AXIS: tl.constexpr):
    """``sums`` and what a tile of score gradients adds to them, summed over one axis, for the terms CHOSEN."""
    added = ()
    for number in tl.static_range(len(CHOSEN)):
        added = added + (sums[number] + tl.sum(gradient * terms[CHOSEN[number]], AXIS),)  # noqa: RUF005 Triton has no *
    return added


@triton.jit
def zeros_for(SIZE: tl.constexpr, CHOSEN: tl.constexpr):
    """Nothing summed up yet."""
    sums = ()
    for _ in tl.static_range(len(CHOSEN)):
        sums = sums + (tl.zeros([SIZE], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def row_lse_of(lse, rows, q_len):
    """Each row's log-sum-exp; +inf, which leaves no weight, for rows past the end and rows whose scores are all -inf.

    NaN for rows with a score of +inf, whose weights are NaN.
    """
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=float("-inf"))
    row_lse = tl.where(row_lse == float("inf"), float("nan"), row_lse)
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse)
