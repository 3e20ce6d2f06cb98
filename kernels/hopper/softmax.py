"""The running softmax of a tile of query rows, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .versions import aggregate

LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Softmax:
    """For each row the largest score so far, before its scale, and sums of its weights relative to that.

    The sums (rows, 8) are of the columns that are alike modulo 8, of which a thread holds all: they are added up across
    threads once, at the end.
    """

    largest: gl.tensor
    sums: gl.tensor

    @gluon.constexpr_function
    def __init__(self, largest, sums):
        self.largest = largest
        self.sums = sums

    @gluon.jit
    def fold(self, scores, scale, MASKED: gl.constexpr):
        """After another tile of scores: the softmax, their weights, and the factor of what was summed before.

        ``scale`` takes a score to the exponent of a power of two. MASKED says that scores may be -inf.
        """
        largest = gl.maximum(self.largest, gl.max(scores, 1))
        pivot = pivot_of(largest, scale, MASKED)
        rescale = gl.exp2(self.largest * scale - pivot)
        weights = gl.exp2(scores * scale - pivot[:, None])
        of_sums = gl.convert_layout(rescale, gl.SliceLayout(1, self.sums.type.layout), assert_trivial=True)
        return Softmax(largest, self.sums * of_sums[:, None] + partial_sums(weights)), weights, rescale

    @gluon.jit
    def normaliser_and_lse(self, scale):
        """What an output row is multiplied by at last, and the natural log-sum-exp of its scaled scores.

        They are 0 and -inf where it saw nothing.
        """
        total = gl.convert_layout(gl.sum(self.sums, 1), self.largest.type.layout)
        empty = total == 0.0
        lse = (self.largest * scale + gl.log2(total)) * LN_2
        return gl.where(empty, 0.0, 1.0 / total), gl.where(empty, float("-inf"), lse)


@gluon.jit
def first_fold(scores, scale):
    """The softmax of the first tile of scores, some of which may be -inf, and their weights."""
    largest = gl.max(scores, 1)
    weights = gl.exp2(scores * scale - pivot_of(largest, scale, True)[:, None])
    return Softmax(largest, partial_sums(weights)), weights


@gluon.jit
def pivot_of(largest, scale, MASKED: gl.constexpr):
    """What is taken from scaled scores before the exponential."""
    if MASKED:
        # A row that sees nothing has a largest score of -inf, and -inf less -inf is no number.
        largest = gl.where(largest == float("-inf"), 0.0, largest)
    return largest * scale


@gluon.jit
def partial_sums(weights):
    """Sums over the columns that a thread holds."""
    return gl.sum(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 8]), 1)
