"""A tensor added to scores."""

from torch import Tensor

from ...kernels.language import at
from ..rules import Scores, score_rule
from .arguments import tensor


@score_rule
def _bias(score, batch, head, row, column, bias):
    return score + at(bias, (batch, head, row, column))


_bias.adds("bias", axes="batch head row column")


def bias(bias: Tensor) -> Scores:
    """score + bias; bias is (batch or 1, heads or 1, q_len or 1, k_len or 1) and may need a gradient."""
    if tensor("bias", bias).ndim != 4 or not bias.is_floating_point():
        raise ValueError(
            f"bias must be (batch, heads, q_len, k_len) floating-point numbers; got {tuple(bias.shape)} {bias.dtype}"
        )
    return _bias(bias)
