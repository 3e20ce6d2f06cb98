"""What to compute, as one validated frozen value."""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from dataclasses import dataclass

import torch

from ..kernels.rules import Mask, Scores
from ..kernels.settings import Settings, Window, within_lengths


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
        scale: what scores are multiplied by first.
        window: how many keys before and after its own position a query sees; None for all.
        mask: an expression of rules that say which pairs are visible (see `cs336_systems.kernels.rules`).
        scores: rules that change scores, in order.
        sinks: whether each head has a logit that takes part in the softmax without a value.
        dropout: the probability that a weight is dropped, if any.
        deterministic: whether results have to be the same to the bit on every run.
        blocks: whether lists of the blocks that the mask leaves anything of are given.
        packed: the lengths (of q, of k) that no packed sequence exceeds, None where that is not said; or None where
            sequences are not packed.
    """

    causal: Causal
    scale: float
    window: Window = (None, None)
    mask: Mask | None = None
    scores: Scores = ()
    sinks: bool = False
    dropout: float | None = None
    deterministic: bool = False
    blocks: bool = False
    packed: tuple[int | None, int | None] | None = None

    @property
    def as_settings(self) -> Settings:
        """What the kernels know of it."""
        of_pairs = (self.causal.value, self.window, self.dropout, self.mask, self.scores)
        return Settings(*of_pairs, self.sinks, self.blocks, self.packed, self.deterministic)

    @property
    def operands(self) -> tuple[float, str, list[float]]:
        """What operators carry of it: the scale, and the rest as text and the numbers that the text leaves out."""
        if torch.compiler.is_compiling():
            return self._as_operands()
        known: tuple[float, str, list[float]] | None = self.__dict__.get("_operands")
        if known is None:
            known = self.__dict__["_operands"] = self._as_operands()
        return known

    def _as_operands(self) -> tuple[float, str, list[float]]:
        settings = self.as_settings
        return self.scale, settings.text, settings.numbers

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but a causal mask, or none, and a scale."""
        # Lengths are compared because torch.compile does not trace `not` of tuples with sizes that it knows by name.
        by_rules = self.mask is not None or len(self.scores) > 0
        others = by_rules or self.sinks or self.dropout is not None or self.packed is not None
        return self.window == (None, None) and not others

    def within(self, q_len: int, k_len: int) -> AttentionSpec:
        """The spec that computes the same for sequences up to these lengths; see `settings.within_lengths`."""
        if self.window == (None, None):
            return self
        return dataclasses.replace(self, window=within_lengths(self.window, self.causal.value, q_len, k_len))

    def band(self, q_len: int, k_len: int) -> Window:
        """Query i sees the keys from i + left to i + right; None where there is no such limit. See `Settings.band`."""
        return self.as_settings.band(q_len, k_len)

    def hides_rows(self, q_len: int, k_len: int) -> bool:
        """Whether some query may see no key at all: its output is 0 and its log-sum-exp -inf, or its sink."""
        if self.packed is not None:
            return True
        left, right = self.band(q_len, k_len)
        before_all = right is not None and right < 0
        after_all = left is not None and q_len - 1 + left >= k_len
        empty = left is not None and right is not None and left > right
        return k_len == 0 or before_all or after_all or empty or self.mask is not None or len(self.scores) > 0


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim): scores of unit-variance queries and keys keep unit variance (Vaswani et al., 2017)."""
    return 1.0 / math.sqrt(head_dim)


def check_spec(causal: bool | str, scale: float | None, head_dim: int) -> AttentionSpec:
    """The spec that ``causal`` and ``scale`` ask for."""
    choices = "True, False, 'top_left' or 'bottom_right'"
    if isinstance(causal, bool):
        mask = Causal.BOTTOM_RIGHT if causal else Causal.NONE
    elif isinstance(causal, str):
        if causal not in ("top_left", "bottom_right"):
            raise ValueError(f"causal must be {choices}; got {str(causal)!r}")
        mask = Causal(causal)
    else:
        raise TypeError(f"causal must be {choices}; got {causal!r} of type {type(causal).__name__}")
    if scale is None:
        return AttentionSpec(mask, default_scale(head_dim))
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float or None; got {scale!r} of type {type(scale).__name__}")
    if abs(scale) > sys.float_info.max or scale != scale:
        raise ValueError(f"scale must be finite; got {str(scale)[:20]}")
    return AttentionSpec(mask, float(scale))


def window_of(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """A window as (before, after).

    Raises:
        TypeError, ValueError: it is no pair of numbers from 0 on, or None.
    """
    expected = "window must be (before, after), each None or an integer from 0 on"
    if window is None:
        return None, None
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"{expected}; got {window!r}")
    for side in window:
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"{expected}; got {window!r}")
        if side is not None and side < 0:
            raise ValueError(f"{expected}; got {window!r}")
    return window
