"""Units: the powers of two by which float32 matrices are scaled into float16's range, and what undoes them.

A group, the matrices of q that share one of k, has a unit for each tensor, found from its statistics: the largest
magnitude, and the largest norm of a row. Tensors that were 16-bit to begin with have none: every unit is 1.

A unit puts the group's largest element near 2**14, close under float16's limit of 65504, so that the low part stays
normal for elements down to 2**-17 of the largest and keeps an absolute error of 2**-39 of the largest below that.
"""

from typing import NamedTuple

import triton
import triton.language as tl

TOP: tl.constexpr = tl.constexpr(14)
"""The exponent that the largest element of a rewritten matrix gets, and by which probabilities are scaled up."""
LOW: tl.constexpr = tl.constexpr(-13)
"""The exponent of the largest weight where these have float32's range: sums of 2**13 largest numbers stay finite.

Lower ones would lose digits: exponents of weights are rounded with it in them, and from 16 on more coarsely.
"""
WEIGHT_UNIT: tl.constexpr = tl.constexpr(2.0**-14)
"""What one step of probabilities scaled up by 2**TOP stands for."""

NORM_UNIT: tl.constexpr = tl.constexpr(6)
"""Norms of rows are stored divided by 2**6: that of up to 4,096 of the largest numbers is no infinity."""


@triton.jit
def power_of_two(exponent):
    """2.0 ** exponent for an integer exponent, kept between the smallest and largest normal powers."""
    biased = tl.minimum(tl.maximum(exponent, -126), 126) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(value):
    """floor(log2(value)) of a non-negative float32; -127 for zero and subnormal numbers."""
    return (value.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def unit_of(statistics, index):
    """What one step of a rewritten matrix stands for; 1 for a tensor that was not rewritten."""
    unit = 1.0
    if statistics is not None:
        unit = power_of_two(exponent_of(tl.load(statistics + 2 * index)) - TOP)
    return unit


@triton.jit
def gradient_unit(v_statistics, dout_statistics, dlse_bound, index, steepest):
    """A unit in which no score gradient overflows: |p (dp - delta)| <= 2 max|dout row| max|v row| + max|dlse|.

    ``steepest`` is by how much score rules may multiply that, and dropout the first term.
    """
    unit = 1.0
    if v_statistics is not None:
        v_norm = tl.load(v_statistics + 2 * index + 1)
        dout_norm = tl.load(dout_statistics + 2 * index + 1)
        # Their product may be beyond float32's range where the gradients are not.
        v_exponent, dout_exponent = exponent_of(v_norm), exponent_of(dout_norm)
        bound = 2.0 * (v_norm * power_of_two(-v_exponent)) * (dout_norm * power_of_two(-dout_exponent))
        exponent = exponent_of(bound * steepest) + v_exponent + dout_exponent + NORM_UNIT * 2
        if dlse_bound is not None:
            exponent = tl.maximum(exponent, exponent_of(tl.load(dlse_bound + index) * steepest)) + 1
        unit = power_of_two(exponent - TOP)
    return unit


class Scales(NamedTuple):
    """Factors between what the products compute and what they stand for; plain ones unless inputs were rewritten.

    score: from q @ k.T to base-2 scores; natural: to scores. dp, delta: from dout @ v.T and from delta to score
    gradients in their unit, step. dq, dk, dv: from the accumulated tiles to the gradients.
    """

    score: tl.tensor
    natural: tl.tensor
    step: tl.tensor
    dp: tl.tensor
    delta: tl.tensor
    dq: tl.tensor
    dk: tl.tensor
    dv: tl.tensor


@triton.jit
def scales_of(
    q_statistics,
    k_statistics,
    v_statistics,
    dout_statistics,
    dlse_bound,
    index,
    scale,
    score_scale,
    kept_scale,
    steepest,
):
    """The factors for the group of matrices ``index``. Weights are scaled up by 2**TOP where inputs were rewritten.

    Those that dropout keeps are multiplied by ``kept_scale``.
    """
    q_unit = unit_of(q_statistics, index)
    k_unit = unit_of(k_statistics, index)
    dout_unit = unit_of(dout_statistics, index)
    step = gradient_unit(v_statistics, dout_statistics, dlse_bound, index, steepest)
    shift = 1.0
    if q_statistics is not None:
        shift = WEIGHT_UNIT
    return Scales(
        score_scale * (q_unit * k_unit),
        scale * (q_unit * k_unit),
        step,
        dout_unit * unit_of(v_statistics, index) / step * shift * kept_scale,
        shift / step,
        step * k_unit * scale,
        step * q_unit * scale,
        dout_unit * shift * kept_scale,
    )
