"""What the passes of the backward share: probabilities, dS, and gradients of what score rules captured.

P is recomputed from q, k and the log-sum-exp. A score rule's gradient term is d score / d captured element; the
gradient of a captured tensor is dS times its term, summed over the pairs that read an element.
"""

import triton
import triton.language as tl

from ...lib.rules import is_singular
from ...lib.softmax import LOG2_E
from .pairs import clamped, visible_pairs
from .softmax import LN_2, recompute_p


@triton.jit
def probabilities(
    s, rows, columns, lse, scales, head, CHECK_COLUMNS: tl.constexpr, MASKED: tl.constexpr, MASK: tl.constexpr,
    SCORE: tl.constexpr, SHIFT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A tile of P, the slope d score / d (scaled q @ k.T) of the score rules, and their gradient terms."""
    slope = 1.0
    terms = ()
    if SCORE is not None:
        row, column = clamped(rows, columns, head, CHECK_COLUMNS)
        scores, slope, terms = SCORE(s * scales.s, head.batch, head.head, row, column, head.captured[1])
        p = recompute_p(scores, LOG2_E, lse, SHIFT)
        if is_singular(SCORE):
            # For rows that do not exist.
            p = tl.where(lse == float("inf"), 0.0, p)
    else:
        p = recompute_p(s, scales.s_log2, lse, SHIFT)
    if MASKED:
        p = tl.where(visible_pairs(rows, columns, head, C.LEFT, C.RIGHT, MASK), p, 0.0)
    return p, slope, terms


@triton.jit
def of_entropies(p, weights):
    """What takes the place of dP where there are no values: -weights * log P.

    With H = -sum P log P of a row and its gradient w, dS = P * (-w log P - w H), so delta is w H.
    """
    return tl.where(p > 0.0, tl.log2(p) * (-LN_2), 0.0) * weights


@triton.jit
def score_gradient(p, dp, delta, scales):
    """dS = P * (dP - delta), scaled by 1 / scales.ds; delta is each row's sum of P * dP."""
    return p * (dp * scales.dp - delta * scales.delta)


@triton.jit
def chained(ds, derivative, SCORE: tl.constexpr):
    """dS times a derivative that SCORE returned, and 0 where dS is: of pairs that do not exist it may be NaN."""
    if is_singular(SCORE):
        product = tl.where(ds == 0.0, 0.0, ds * derivative)
    else:
        product = ds * derivative
    return product


@triton.jit
def add_terms(sums, ds, terms, SCORE: tl.constexpr, TERMS: tl.constexpr):
    """Add dS times each of the gradient terms TERMS, summed over the tile's second axis."""
    added = ()
    for number in tl.static_range(len(TERMS)):
        added = added + (sums[number] + tl.sum(chained(ds, terms[TERMS[number]], SCORE), 1),)  # noqa: RUF005 Triton has no *
    return added


@triton.jit
def zeros_for(SIZE: tl.constexpr, TERMS: tl.constexpr):
    """Sums of no tile yet."""
    sums = ()
    for _ in tl.static_range(len(TERMS)):
        sums = sums + (tl.zeros([SIZE], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def row_numbers(pointer, rows, q_len):
    """A float32 number for each row; 0 for rows that do not exist."""
    return tl.load(pointer + rows, mask=rows < q_len, other=0.0)


@triton.jit
def load_lse(lse, rows, q_len):
    """The log-sum-exp of each row; +inf, which makes P 0, for rows that do not exist or see nothing.

    NaN for rows with a score of +inf, whose P is NaN.
    """
    row_lse = tl.load(lse + rows, mask=rows < q_len, other=float("-inf"))
    row_lse = tl.where(row_lse == float("inf"), float("nan"), row_lse)
    return tl.where(row_lse == float("-inf"), float("inf"), row_lse)
