"""Powers of two that scale float32 matrices into float16's range, and the factors that undo them.

A group is one head of k and v with all heads of q that share it. Each tensor has one scale a group, from its stats: the
largest magnitude, and the largest norm of a row. The scale puts the largest element near 2**14, just below float16's
limit of 65504: the low half of an element is then normal down to 2**-17 of the largest, and below that has an absolute
error of 2**-39 of the largest. Tensors that were 16-bit to begin with have no stats and a scale of 1.
"""

from typing import NamedTuple

import triton
import triton.language as tl

TOP: tl.constexpr = tl.constexpr(14)
"""The exponent of the largest element of a scaled matrix; probabilities are scaled by 2**TOP too."""
LOW: tl.constexpr = tl.constexpr(-13)
"""The exponent of the largest p where p has float32's range: sums of 2**13 largest numbers stay finite.

A lower one would lose digits: p's exponents are rounded with it included, and from 16 on more coarsely.
"""
P_SCALE: tl.constexpr = tl.constexpr(2.0**-14)
"""Undoes the scale of p, 2**TOP."""
NORM_SHIFT: tl.constexpr = tl.constexpr(6)
"""Norms of rows are stored divided by 2**6: that of 4,096 of the largest numbers is finite."""


@triton.jit
def power_of_two(exponent):
    """2.0 ** exponent of an integer, clamped to the smallest and the largest normal power."""
    biased = tl.minimum(tl.maximum(exponent, -126), 126) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(value):
    """floor(log2(value)) of a non-negative float32; -127 for zero and subnormal numbers."""
    return (value.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def pow2_scale(stats, group):
    """What undoes the scale of a tensor in a group."""
    scale = 1.0
    if stats is not None:
        scale = power_of_two(exponent_of(tl.load(stats + 2 * group)) - TOP)
    return scale


@triton.jit
def ds_scale(v_stats, dout_stats, dlse_bound, group, max_slope):
    """What undoes a scale by which no dS overflows: |p (dp - delta)| <= 2 max|dout row| max|v row| + max|dlse|.

    Without values ``dlse_bound`` alone bounds dS, also that of 16-bit inputs: its gradients have float32's range.
    ``max_slope`` is the largest factor by which score rules multiply dS, and dropout the first term.
    """
    scale = 1.0
    if v_stats is not None:
        v_norm = tl.load(v_stats + 2 * group + 1)
        dout_norm = tl.load(dout_stats + 2 * group + 1)
        # Their product may exceed float32's range where the gradients do not.
        v_exponent, dout_exponent = exponent_of(v_norm), exponent_of(dout_norm)
        bound = 2.0 * (v_norm * power_of_two(-v_exponent)) * (dout_norm * power_of_two(-dout_exponent))
        exponent = exponent_of(bound * max_slope) + v_exponent + dout_exponent + NORM_SHIFT * 2
        if dlse_bound is not None:
            exponent = tl.maximum(exponent, exponent_of(tl.load(dlse_bound + group) * max_slope)) + 1
        scale = power_of_two(exponent - TOP)
    elif dlse_bound is not None:
        scale = power_of_two(exponent_of(tl.load(dlse_bound + group) * max_slope) + 1 - TOP)
    return scale


class Scales(NamedTuple):
    """Factors of the backward's products; 1 or the call's scale where inputs are not split.

    s_log2: q @ k.T to base-2 scores. s: to scores. ds: dS to true score gradients. dp, delta: dout @ v.T and delta to
    dS. dq, dk, dv: the accumulators to the gradients.
    """

    s_log2: tl.tensor
    s: tl.tensor
    ds: tl.tensor
    dp: tl.tensor
    delta: tl.tensor
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor


@triton.jit
def scales_of(
    q_stats, k_stats, v_stats, dout_stats, dlse_bound, group, scale, scale_log2, keep_scale, max_slope
):  # fmt: skip
    """The factors of a group. p is scaled by 2**TOP where inputs are split; kept p are multiplied by ``keep_scale``."""
    q_scale = pow2_scale(q_stats, group)
    k_scale = pow2_scale(k_stats, group)
    dout_scale = pow2_scale(dout_stats, group)
    ds = ds_scale(v_stats, dout_stats, dlse_bound, group, max_slope)
    p_scale = 1.0
    if q_stats is not None:
        p_scale = P_SCALE
    return Scales(
        scale_log2 * (q_scale * k_scale),
        scale * (q_scale * k_scale),
        ds,
        dout_scale * pow2_scale(v_stats, group) / ds * p_scale * keep_scale,
        p_scale / ds,
        ds * k_scale * scale,
        ds * q_scale * scale,
        dout_scale * p_scale * keep_scale,
    )
