"""Attention with linear biases (Press et al., "Train short, test long", 2022)."""

from torch import Tensor

from ...kernels.torch_names import surely
from ..rules import Scores
from .arguments import MOST, integer, tensor
from .recorded import FLOATS, INTEGERS, recorded_scores

_alibi = recorded_scores(
    lambda score, b, h, q_idx, kv_idx, slopes, shift: score - slopes[b, h] * (q_idx + shift - kv_idx).abs(),
    (FLOATS, 2),
    int,
)
_alibi_of_entries = recorded_scores(
    lambda score, b, h, q_idx, kv_idx, slopes, shifts: score - slopes[b, h] * (q_idx + shifts[b] - kv_idx).abs(),
    (FLOATS, 2),
    (INTEGERS, 1),
)


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
