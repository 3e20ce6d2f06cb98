"""A tensor added to scores."""

from torch import Tensor

from ..rules import Scores
from .arguments import tensor
from .recorded import FLOATS, recorded_scores

_bias = recorded_scores(lambda score, b, h, q_idx, kv_idx, bias: score + bias[b, h, q_idx, kv_idx], (FLOATS, 4))


def bias(bias: Tensor) -> Scores:
    """score + bias; bias is (batch or 1, heads or 1, q_len or 1, k_len or 1) and may need a gradient."""
    if tensor("bias", bias).ndim != 4 or not bias.is_floating_point():
        raise ValueError(
            f"bias must be (batch, heads, q_len, k_len) floating-point numbers; got {tuple(bias.shape)} {bias.dtype}"
        )
    return _bias(bias)
