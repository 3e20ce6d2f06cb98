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
from .tracing.compiled import rule_of
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
            operator and the line. Within torch.compile it is Dynamo's exception, which has the message.
        TypeError: it returns no bool tensor.
    """
    return Mask(*_recorded(mod, "mask"))


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
    leaf, tensors = _recorded(mod, "score")
    return Scores((leaf,), tensors)


def as_mask(mask: Tensor | Mask | MaskMod | None, like: Tensor | None = None) -> Tensor | Mask | None:
    """A function as the `Mask` that it describes, for a call on the device of ``like``; anything else as it is."""
    return Mask(*_recorded(mask, "mask", like)) if _is_function(mask) else mask  # type: ignore[return-value]


def as_scores(scores: Scores | ScoreMod | None, like: Tensor | None = None) -> Scores | None:
    """A function as the `Scores` that it describes, for a call on the device of ``like``; anything else as it is."""
    if not _is_function(scores):
        return scores  # type: ignore[return-value]
    leaf, tensors = _recorded(scores, "score", like)
    return Scores((leaf,), tensors)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (Tensor, Mask, Scores))


def _recorded(mod: Any, kind: str, like: Tensor | None = None) -> Recorded:
    """The rule of a function, and what it captured."""
    if not _is_function(mod):
        raise TypeError(f"{kind}_mod must be given a function; got {type(mod).__name__}")
    if torch.compiler.is_dynamo_compiling():
        return rule_of(mod, kind, None if like is None else like.device)
    if torch.compiler.is_compiling():
        raise TypeError(
            f"{kind}_mod cannot be called where torch.export traces with strict=False: make the mask or the score "
            "change before, or pass strict=True"
        )

    def make() -> tuple[Recorded, bool]:
        graph, result = record(mod, PLACES[kind])
        return write(kind, graph, result), not graph.computes

    return kept(mod, kind, make)
