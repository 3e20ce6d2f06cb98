"""Checks of arguments that the functions of ``flash_attn`` share; messages name them as it does."""

from __future__ import annotations

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


def settings_of(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """What ``flash_attn`` calls by these names, as `attention` takes it."""
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    return {
        "causal": causal,
        "window": window_of(window_size),
        "scale": softmax_scale,
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "dropout_p": dropout_p,
        "deterministic": deterministic or None,
        "return_lse": return_attn_probs,
    }


def check_flags(**flags: Any) -> None:
    """Each must be a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool; got {flag!r} of type {type(flag).__name__}")


def window_of(sides: tuple[int, int]) -> tuple[int | None, int | None]:
    """(left, right), -1 meaning all, as `attention` takes a window."""
    expected = "window_size must be (left, right), each an integer from 0 on or -1"
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"{expected}; got {sides!r}")
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, int):
            raise TypeError(f"{expected}; got {sides!r}")
        if side < -1:
            raise ValueError(f"{expected}; got {sides!r}")
    left, right = (None if side == -1 else side for side in sides)
    return left, right
