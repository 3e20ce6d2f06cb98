"""The online softmax of a consumer warp group's 64 rows, in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .struct import struct

LN_2 = gl.constexpr(0.6931471805599453)

OVERFLOW_SUM = gl.constexpr(2.0**64)
"""A row sum from which on probabilities, or what they multiply, may have overflowed."""

LARGEST_EXPONENT = gl.constexpr(2.0**20)
"""The largest pivot for `update`, which rounds it but not the scores: above, equal scores may differ by 1/16."""

TWO_LOG2_E = gl.constexpr(2.8853900817779268)
SMALL = gl.constexpr(0.4)
"""Up to here tanh is a polynomial, with a relative error below 1.2e-7. Above, the other formula's is below 3.1e-7."""
TANH_3, TANH_5, TANH_7 = gl.constexpr(-0.33331882), gl.constexpr(0.13277625), gl.constexpr(-0.047794)


@struct
class ScoreScale:
    """From products q kᵀ to exponents of 2: a factor, after tanh(softcap_scale * product) if SOFTCAP.

    With a soft cap, softcap * tanh(scale * product / softcap), the factor is softcap * log2(e), else scale * log2(e).
    """

    scale: gl.tensor
    softcap_scale: gl.tensor
    SOFTCAP: gl.constexpr

    @gluon.jit
    def softcap(self, s):
        """Scores S before the factor, with a relative error of at most 3.1e-7."""
        if self.SOFTCAP:
            x = s * self.softcap_scale
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which loses the digits of a small x.
            grown = gl.exp2(x * TWO_LOG2_E) + 1.0
            large = 1.0 - 2.0 * gl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=r,r", [grown], dtype=gl.float32, is_pure=True, pack=1
            )
            square = x * x
            small = x + x * (square * (TANH_3 + square * (TANH_5 + square * TANH_7)))
            s = gl.where(gl.abs(x) < SMALL, small, large)
        return s


@struct
class OnlineSoftmax:
    """For each row a pivot, the score before its factor that P is relative to, and sums of P.

    The sums (rows, 8) are over the columns that are equal modulo 8, which one thread holds. They are added across
    threads once, at the end.

    A softmax does not depend on its pivot unless P overflows. So the row maximum is taken over the tiles that are
    visited first, and not after them: `update` needs no maximum, which is a third of a step's instructions and comes
    before all exponentials, and no rescaling. P may grow to 2**64 where scores exceed the first ones by 44 (natural)
    units. `is_overflow_free` checks that it did not; else the tile is computed again with `update_rescaling` alone.
    """

    pivot: gl.tensor
    sums: gl.tensor

    @gluon.jit
    def update_rescaling(self, s, scale):
        """Take in a tile of scores, -inf where masked: the softmax, P, and the factor for what was summed before.

        ``scale`` takes scores to exponents of 2. The pivot becomes the row maximum so far.
        """
        row_max = gl.maximum(self.pivot, gl.max(s, 1))
        pivot = finite(row_max)
        rescale = gl.exp2((self.pivot - pivot) * scale)
        p = gl.exp2((s - pivot[:, None]) * scale)
        of_sums = gl.convert_layout(rescale, gl.SliceLayout(1, self.sums.type.layout), assert_trivial=True)
        return OnlineSoftmax(row_max, self.sums * of_sums[:, None] + partial_sums(p)), p, rescale

    @gluon.jit
    def update(self, s, scale):
        """Take in a tile of scores, -inf where masked, keeping the pivot: the softmax and P."""
        p = gl.exp2(s * scale - (finite(self.pivot) * scale)[:, None])
        return OnlineSoftmax(self.pivot, self.sums + partial_sums(p)), p

    @gluon.jit
    def has_pivots(self):
        """Whether all rows have seen something."""
        return gl.min((self.pivot > float("-inf")).to(gl.int32), 0) != 0

    @gluon.jit
    def row_sums(self):
        """Each row's sum of P."""
        return gl.convert_layout(gl.sum(self.sums, 1), self.pivot.type.layout)

    @gluon.jit
    def finalize(self, scale, sink):
        """Each row's 1 / sum, and the natural log-sum-exp of its scaled scores.

        They are 0 and -inf where a row saw nothing, or only scores that are -inf. sink: the exponent of 2 of a logit
        that joins every row's sum, and is a row's log-sum-exp in place of -inf; or None.
        """
        totals = self.row_sums()
        row_max = finite(self.pivot) * scale
        empty = (totals == 0.0) | (row_max == float("-inf"))
        nothing = float("-inf")
        if sink is not None:
            nothing = sink * LN_2
            totals += gl.exp2(sink - row_max)
        # A score of +inf makes P NaN, and out with it, but not the log-sum-exp.
        lse = gl.where(row_max == float("inf"), row_max, (row_max + gl.log2(totals)) * LN_2)
        if sink is not None:
            # So far above all scores that nothing of them is left.
            lse = gl.where((totals == float("inf")) & (sink > row_max), nothing, lse)
        return gl.where(empty, 0.0, 1.0 / totals), gl.where(empty, nothing, lse)

    @gluon.jit
    def is_overflow_free(self, out, updated, scale):
        """Whether neither P nor an unnormalized output row (rows, columns) has overflowed or underflowed.

        ``updated``: whether `update` was called, which needs a pivot that is not -inf and not large.
        """
        has_pivot = (gl.abs(self.pivot * scale) < LARGEST_EXPONENT) | (not updated)
        small = ((self.row_sums() < OVERFLOW_SUM) & has_pivot).to(gl.int32)
        # 0 times what is not finite is not 0.
        is_finite = (gl.sum(out * 0.0, 1) == 0.0).to(gl.int32)
        return (gl.min(small, 0) & gl.min(is_finite, 0)) != 0


@gluon.jit
def first_update(s, scale):
    """The softmax and P of the first tile of scores, -inf where masked."""
    row_max = gl.max(s, 1)
    p = gl.exp2((s - finite(row_max)[:, None]) * scale)
    return OnlineSoftmax(row_max, partial_sums(p)), p


@gluon.jit
def finite(row_max):
    """0 for the maximum of a row that sees nothing: -inf - -inf is NaN."""
    return gl.where(row_max == float("-inf"), 0.0, row_max)


@gluon.jit
def partial_sums(p):
    """Sums (rows, 8) over the columns that a thread holds, each added to the sum of those before it.

    Since Triton 3.9 `gl.sum` adds in pairs: ptxas then has most exponentials wait for one another, and adds when they
    are over, where it could add while they are computed.
    """
    return sequential_sum(gl.permute(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), [0, 2, 1]))


@gluon.jit
def sequential_sum(x):
    """The sum over the last axis, which a thread holds, of (rows, columns, a power of two)."""
    if x.shape[2] == 1:
        return gl.reshape(x, [x.shape[0], x.shape[1]])
    else:
        first, second = halves(x)
        return add_sequentially(sequential_sum(first), second)


@gluon.jit
def add_sequentially(total, x):
    """``total`` plus the elements of the last axis, one after the other."""
    if x.shape[2] == 1:
        return total + gl.reshape(x, [x.shape[0], x.shape[1]])
    else:
        first, second = halves(x)
        return add_sequentially(add_sequentially(total, first), second)


@gluon.jit
def halves(x):
    """The two halves of the last axis."""
    shape: gl.constexpr = [x.shape[0], x.shape[1], 2, x.shape[2] // 2]
    return gl.split(gl.permute(gl.reshape(x, shape), [0, 1, 3, 2]))
