"""Masks and score changes as plain Python functions of a pair, as FlexAttention has them.

>>> @mask_mod
... def same_document(b, h, q_idx, kv_idx):
...     return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])
>>> attention(q, k, v, mask=same_document)

>>> attention(q, k, v, scores=lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs())

A function is called once, with tensors without axes that stand for a pair, and what it does with them is recorded:
torch's operators on elements, and elements of captured tensors, ``table[h, kv_idx - q_idx + 63]``. From that come the
code of the kernels, its derivative, and the gradients of captured tensors. Those that are read at ``b``, ``h``,
``q_idx``, ``kv_idx``, or ``kv_idx - q_idx`` plus a number have these axes. What is read at other indices is gathered
before a call, into a tensor with as many axes as the indices depend on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.mods import PLACES
from .rules import Mask, Scores
from .tracing.kept import Recorded, kept
from .tracing.record import record
from .tracing.source import write

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of (b, h, q_idx, kv_idx): whether query q_idx of head h and entry b of the batch sees key kv_idx."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of (score, b, h, q_idx, kv_idx): the changed score."""


def mask_mod(mod: MaskMod) -> Mask:
    """The mask that a function of (b, h, q_idx, kv_idx) describes, with the tensors that it captures now.

    Args:
        mod: returns a bool tensor from tensors without axes, by torch's operators on elements. ``h`` is the number of
            the query head; a call without an axis of heads has head 0.

    Raises:
        ValueError: the function does what cannot be traced, such as branching on a value. The message names the
            operator and the line.
        TypeError: it returns no bool tensor.
    """
    _check(mod, "mask_mod")

    def make() -> tuple[Recorded, bool]:
        graph, result = record(mod, PLACES["mask"])
        if result.dtype is not torch.bool:
            raise TypeError(f"a mask_mod must return a bool tensor; got {result.dtype}")
        return write("mask", graph, result), not graph.computes

    return Mask(*kept(mod, "mask", make))


def score_mod(mod: ScoreMod) -> Scores:
    """The score change that a function of (score, b, h, q_idx, kv_idx) describes, with what it captures now.

    The score is float32, or float64 where q is, and so are the elements of captured floating-point tensors.

    Args:
        mod: returns a floating-point tensor from tensors without axes, by torch's operators on elements. Its derivative
            by the score and by elements of captured tensors is autograd's.

    Raises:
        ValueError: as `mask_mod`.
        TypeError: the function returns no floating-point tensor.
    """
    _check(mod, "score_mod")

    def make() -> tuple[Recorded, bool]:
        graph, result = record(mod, PLACES["score"])
        if result.is_integer:
            raise TypeError(f"a score_mod must return a floating-point tensor; got {result.dtype}")
        return write("score", graph, result), not graph.computes

    leaf, tensors = kept(mod, "score", make)
    return Scores((leaf,), tensors)


def as_mask(mask: Tensor | Mask | MaskMod | None) -> Tensor | Mask | None:
    """A function as the `Mask` that it describes; anything else as it is."""
    return mask_mod(mask) if _is_function(mask) else mask  # type: ignore[arg-type,return-value]


def as_scores(scores: Scores | ScoreMod | None) -> Scores | None:
    """A function as the `Scores` that it describes; anything else as it is."""
    return score_mod(scores) if _is_function(scores) else scores  # type: ignore[arg-type,return-value]


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (Tensor, Mask, Scores))


def _check(mod: Any, name: str) -> None:
    if not _is_function(mod):
        raise TypeError(f"{name} must be given a function; got {type(mod).__name__}")
    if torch.compiler.is_compiling():
        raise TypeError(f"{name} cannot be called within torch.compile: make the mask or the score change before")
