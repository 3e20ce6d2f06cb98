"""The running softmax of a tile of query rows, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..versions import aggregate

LN_2 = gl.constexpr(0.6931471805599453)

LARGEST_SUM = gl.constexpr(2.0**64)
"""Of weights added without looking for the largest score: above it, they or what they multiply may have overflowed."""

LARGEST_EXPONENT = gl.constexpr(2.0**20)
"""Of a pivot that tiles are added to: `add` rounds it and not those of scores, so equal scores may differ by 1/16."""

TWO_LOG2_E = gl.constexpr(2.8853900817779268)
SMALL = gl.constexpr(0.4)
"""Up to here tanh is a polynomial, with a relative error below 1.2e-7. Above, the other formula's is below 3.1e-7."""
TANH_3, TANH_5, TANH_7 = gl.constexpr(-0.33331882), gl.constexpr(0.13277625), gl.constexpr(-0.047794)


@aggregate
class Exponents:
    """What takes scores to exponents of 2: a factor, and before it, if CAPPED, tanh(steepness * score).

    A soft cap is cap * tanh(scale * score / cap), whose factor is cap.
    """

    scale: gl.tensor
    steepness: gl.tensor
    CAPPED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale, steepness, CAPPED):
        self.scale = scale
        self.steepness = steepness
        self.CAPPED = gl.constexpr(CAPPED)

    @gluon.jit
    def cap(self, scores):
        """Scores that the factor takes to exponents, with a relative error of at most 3.1e-7."""
        if self.CAPPED:
            x = scores * self.steepness
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which loses the digits of a small x.
            grown = gl.exp2(x * TWO_LOG2_E) + 1.0
            large = 1.0 - 2.0 * gl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=r,r", [grown], dtype=gl.float32, is_pure=True, pack=1
            )
            square = x * x
            small = x + x * (square * (TANH_3 + square * (TANH_5 + square * TANH_7)))
            scores = gl.where(gl.abs(x) < SMALL, small, large)
        return scores


@aggregate
class Softmax:
    """For each row a score, before its scale, that its weights are relative to, and sums of them.

    The sums (rows, 8) are of the columns that are alike modulo 8, of which a thread holds all: they are added up across
    threads once, at the end.

    A softmax is the same whatever score its weights are relative to, unless they overflow. So the largest score is
    looked for in the tiles that are visited first, and then no more: `add` spares the maximum, which is a third of a
    step's instructions and comes before all exponentials, and what was summed need not be rescaled. Weights may grow to
    2 ** 64 so, where scores exceed the first by 44 (natural) units; `is_certain` says whether none did, and otherwise
    the tile is computed again with `fold` alone.
    """

    pivot: gl.tensor
    sums: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pivot, sums):
        self.pivot = pivot
        self.sums = sums

    @gluon.jit
    def fold(self, scores, scale):
        """After a tile of scores, -inf where hidden: the softmax, their weights, and the factor of sums before.

        ``scale`` takes a score to the exponent of a power of two. The pivot becomes the largest score so far.
        """
        largest = gl.maximum(self.pivot, gl.max(scores, 1))
        pivot = finite(largest)
        rescale = gl.exp2((self.pivot - pivot) * scale)
        weights = gl.exp2((scores - pivot[:, None]) * scale)
        of_sums = gl.convert_layout(rescale, gl.SliceLayout(1, self.sums.type.layout), assert_trivial=True)
        return Softmax(largest, self.sums * of_sums[:, None] + partial_sums(weights)), weights, rescale

    @gluon.jit
    def add(self, scores, scale):
        """After a tile of scores that are all seen: the softmax, its pivot unchanged, and their weights."""
        weights = gl.exp2(scores * scale - (finite(self.pivot) * scale)[:, None])
        return Softmax(self.pivot, self.sums + partial_sums(weights)), weights

    @gluon.jit
    def totals(self):
        """The sum of each row's weights."""
        return gl.convert_layout(gl.sum(self.sums, 1), self.pivot.type.layout)

    @gluon.jit
    def normaliser_and_lse(self, scale):
        """What an output row is multiplied by at last, and the natural log-sum-exp of its scaled scores.

        They are 0 and -inf where it saw nothing, or scores that are -inf after their scale alone.
        """
        totals = self.totals()
        largest = finite(self.pivot) * scale
        empty = (totals == 0.0) | (largest == float("-inf"))
        # A score of +inf makes the weights NaN, of which the log-sum-exp, unlike the output, needs none.
        lse = gl.where(largest == float("inf"), largest, (largest + gl.log2(totals)) * LN_2)
        return gl.where(empty, 0.0, 1.0 / totals), gl.where(empty, float("-inf"), lse)

    @gluon.jit
    def is_certain(self, out, added, scale):
        """Whether neither a weight nor an output row (rows, width), not yet normalised, has overflowed or underflowed.

        ``added``: whether `add` was called, whose weights are wrong where the pivot is -inf or its exponent large.
        """
        has_pivot = (gl.abs(self.pivot * scale) < LARGEST_EXPONENT) | (not added)
        small = ((self.totals() < LARGEST_SUM) & has_pivot).to(gl.int32)
        # Of what is not finite 0 times is not 0.
        sound = (gl.sum(out * 0.0, 1) == 0.0).to(gl.int32)
        return (gl.min(small, 0) & gl.min(sound, 0)) != 0


@gluon.jit
def first_fold(scores, scale):
    """The softmax of the first tile of scores, some of which may be -inf, and their weights."""
    largest = gl.max(scores, 1)
    weights = gl.exp2((scores - finite(largest)[:, None]) * scale)
    return Softmax(largest, partial_sums(weights)), weights


@gluon.jit
def finite(largest):
    """A row that sees nothing has a largest score of -inf, and -inf less -inf is no number."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def partial_sums(weights):
    """Sums over the columns that a thread holds, each added after the one before, from the first.

    Since Triton 3.9 `gl.sum` adds pairs, then pairs of sums: the assembler then has most exponentials wait for one
    another, and adds when they are over, where it could add while they are computed.
    """
    return in_turn(gl.permute(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 8]), [0, 2, 1]))


@gluon.jit
def in_turn(numbers):
    """Sums over the last axis, which a thread holds, of (rows, columns, a power of two)."""
    if numbers.shape[2] == 1:
        return gl.reshape(numbers, [numbers.shape[0], numbers.shape[1]])
    else:
        first, second = halves(numbers)
        return added_in_turn(in_turn(first), second)


@gluon.jit
def added_in_turn(total, numbers):
    """A total to which they are added, one after the other."""
    if numbers.shape[2] == 1:
        return total + gl.reshape(numbers, [numbers.shape[0], numbers.shape[1]])
    else:
        first, second = halves(numbers)
        return added_in_turn(added_in_turn(total, first), second)


@gluon.jit
def halves(numbers):
    """The first and the second half of the last axis."""
    shape: gl.constexpr = [numbers.shape[0], numbers.shape[1], 2, numbers.shape[2] // 2]
    return gl.split(gl.permute(gl.reshape(numbers, shape), [0, 1, 3, 2]))
