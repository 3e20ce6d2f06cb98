"""Checks of arguments that the functions of ``flash_attn`` share; messages name them as it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..attention.validation import check_tensors, shape_of


def parts(name: str, packed: Tensor, number: int, *leading: str) -> tuple[Tensor, ...]:
    """The tensors that ``packed`` holds along the axis before its heads, whose shape is (*leading, number, heads, d).

    ``leading`` are the names of the axes before.
    """
    check_tensors(**{name: packed})
    axis = len(leading)
    if packed.ndim != axis + 3 or packed.shape[axis] != number:
        expected = ", ".join(leading)
        raise ValueError(f"{name} must have shape ({expected}, {number}, heads, d); got {shape_of(packed)}")
    return packed.unbind(axis)


Number = float | Tensor
"""A Python number, one of NumPy's, or a tensor of one element, which is waited for; ``flash_attn`` takes them all."""

Pair = Sequence[Number] | Tensor


def number_in(value: Any) -> Any:
    """The Python number that NumPy's, or a tensor or an array of one element, stands for; any other value as it is."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def settings_of(
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size: Pair,
    softcap: Number,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """What ``flash_attn`` calls by these names, as `attention` takes it."""
    return {
        "causal": flag_of("causal", causal),
        "window": window_of(window_size),
        "scale": number_in(softmax_scale),
        "softcap": number_in(softcap) or None,
        "alibi_slopes": alibi_slopes,
        "dropout_p": number_in(dropout_p),
        "deterministic": flag_of("deterministic", deterministic) or None,
        "return_lse": flag_of("return_attn_probs", return_attn_probs),
    }


def flag_of(name: str, given: Any) -> bool:
    """A bool, which 0 and 1 stand for too."""
    flag = number_in(given)
    if isinstance(flag, int) and flag in (0, 1):
        return bool(flag)
    raise TypeError(f"{name} must be a bool; got {given!r} of type {type(given).__name__}")


def window_of(sides: Pair) -> tuple[int | None, int | None]:
    """(left, right), -1 meaning all, as `attention` takes a window."""
    expected = "window_size must be (left, right), each an integer from 0 on or -1"
    numbers: Any = sides
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    pair = [number_in(side) for side in numbers] if isinstance(numbers, (tuple, list)) else []
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in pair):
        raise TypeError(f"{expected}; got {sides!r}")
    if min(pair) < -1:
        raise ValueError(f"{expected}; got {sides!r}")
    left, right = (None if side == -1 else side for side in pair)
    return left, right
