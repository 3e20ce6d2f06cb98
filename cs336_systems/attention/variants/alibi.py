"""Attention with linear biases (Press et al., "Train short, test long", 2022)."""

from torch import Tensor

from ...kernels.language import at, tl
from ...kernels.torch_names import surely
from ..rules import Scores, score_rule
from .arguments import MOST, integer, tensor


@score_rule
def _alibi(score, batch, head, row, column, slopes, shift):
    return score - at(slopes, (batch, head)) * tl.abs(row + shift - column)


@_alibi.gradient("slopes", axes="batch head")
def _alibi_distance(score, batch, head, row, column, slopes, shift):
    return -(tl.abs(row + shift - column).to(tl.float32))


@score_rule
def _alibi_of_entries(score, batch, head, row, column, slopes, shifts):
    return score - at(slopes, (batch, head)) * tl.abs(row + at(shifts, (batch,)) - column)


@_alibi_of_entries.gradient("slopes", axes="batch head")
def _alibi_distance_of_entries(score, batch, head, row, column, slopes, shifts):
    return -(tl.abs(row + at(shifts, (batch,)) - column).to(tl.float32))


_alibi_of_entries.reads("shifts", axes="batch")


def alibi(slopes: Tensor, shift: int | Tensor = 0) -> Scores:
    """score - slope * |i + shift - j|, for query i and key j.

    Args:
        slopes: (batch or 1, heads or 1).
        shift: k_len - q_len aligns the last query with the last key; for packed sequences (batch,) integers.
    """
    if tensor("slopes", slopes).ndim != 2 or not slopes.is_floating_point():
        got = f"{tuple(slopes.shape)} {slopes.dtype}"
        raise ValueError(f"slopes must be (batch, heads) floating-point numbers; got {got}")
    if not isinstance(shift, Tensor):
        if surely(integer("shift", shift) > MOST) or surely(shift < -MOST):
            raise ValueError(f"shift must be from {-MOST} to {MOST}; got {shift}")
        return _alibi(slopes, shift)
    if shift.ndim != 1 or shift.is_floating_point():
        raise ValueError(f"shift must be an integer or (batch,) of them; got {tuple(shift.shape)} {shift.dtype}")
    return _alibi_of_entries(slopes, shift)
