"""What to compute, as one validated frozen value."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


class Causal(str, enum.Enum):
    """Which keys a query may see.

    NONE: all. TOP_LEFT: key j for query i when j <= i, as torch's ``is_causal``. BOTTOM_RIGHT: the last query sees the
    last key, so j <= i + k_len - q_len, as FlashAttention and a cache of past keys need. They agree for equal lengths.
    """

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


@dataclass(frozen=True)
class AttentionSpec:
    """Everything that attention computes apart from its tensors.

    Attributes:
        causal: which keys a query may see.
        scale: what scores are multiplied by before the softmax.
    """

    causal: Causal
    scale: float

    def diagonal(self, q_len: int, k_len: int) -> int:
        """The last key that query 0 sees under a causal mask; negative when it sees none."""
        return k_len - q_len if self.causal is Causal.BOTTOM_RIGHT else 0

    def visible(self, rows: slice, columns: slice, diagonal: int, device: torch.device) -> Bool[Tensor, "rows columns"]:
        """Whether queries ``rows`` see keys ``columns`` under the causal mask with this `diagonal`."""
        row = torch.arange(rows.start, rows.stop, device=device)
        column = torch.arange(columns.start, columns.stop, device=device)
        return column <= row[:, None] + diagonal

    def hides_rows(self, q_len: int, k_len: int) -> bool:
        """Whether some query may see no key at all: its output is 0 and its log-sum-exp -inf."""
        return k_len == 0 or (self.causal is not Causal.NONE and self.diagonal(q_len, k_len) < 0)


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim): scores of unit-variance queries and keys keep unit variance (Vaswani et al., 2017)."""
    return 1.0 / math.sqrt(head_dim)
