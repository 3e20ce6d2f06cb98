"""Attention with linear biases (Press et al., "Train short, test long", 2022)."""

from torch import Tensor

from ...kernels.language import at, tl
from ..rules import Scores, score_rule


@score_rule
def _alibi(score, batch, head, row, column, slopes, shift):
    return score - at(slopes, (batch, head)) * tl.abs(row + shift - column)


@_alibi.gradient("slopes", axes="batch head")
def _alibi_distance(score, batch, head, row, column, slopes, shift):
    return -(tl.abs(row + shift - column).to(tl.float32))


def alibi(slopes: Tensor, shift: int = 0) -> Scores:
    """score - slope * |i + shift - j|, for query i and key j.

    Args:
        slopes: (batch or 1, heads or 1).
        shift: k_len - q_len aligns the last query with the last key.
    """
    if slopes.ndim != 2 or not slopes.is_floating_point():
        raise ValueError(
            f"slopes must be (batch, heads) floating-point numbers; got {tuple(slopes.shape)} {slopes.dtype}"
        )
    return _alibi(slopes, shift)
