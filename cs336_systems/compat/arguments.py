"""Checks and conversions of arguments. Messages use the argument names of the function that is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Number = float | Tensor
"""A Python or NumPy number, or a tensor of one element, which is read with a host synchronisation."""

Pair = Sequence[Number] | Tensor


def check_tensor(name: str, x: object) -> None:
    """Raise TypeError unless ``x`` is a dense tensor, and ValueError if it has less than two dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} must be a dense (strided) tensor; got a nested tensor")
    if x.ndim < 2:
        raise ValueError(f"{name} must have at least 2 dimensions (length, head_dim); got {tuple(x.shape)}")


def check_shape(name: str, x: Tensor, *axes: str | int) -> None:
    """Raise unless ``x`` is a tensor with these axes: a name for an axis of any size, or the size."""
    check_tensor(name, x)
    if x.ndim != len(axes) or any(isinstance(size, int) and size != n for size, n in zip(axes, x.shape, strict=True)):
        raise ValueError(f"{name} must have shape ({', '.join(map(str, axes))}); got {tuple(x.shape)}")


def to_number(value: Any) -> Any:
    """The Python number in a NumPy number, or in a tensor or an array of one element; other values unchanged."""
    count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", None)
    return value.item() if count == 1 and hasattr(value, "item") else value


def to_bool(name: str, value: Any) -> bool:
    """The bool in ``value``, which may also be 0 or 1; anything else is a TypeError."""
    number = to_number(value)
    if isinstance(number, int) and number in (0, 1):
        return bool(number)
    raise TypeError(f"{name} must be a bool; got {value!r} of type {type(value).__name__}")


def to_window(window_size: Pair) -> tuple[int | None, int | None]:
    """The ``window`` of `attention` for a ``window_size``, in which -1 means unlimited."""
    expected = "window_size must be (left, right), each an integer from 0 on or -1"
    sides: Any = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    pair = [to_number(side) for side in sides] if isinstance(sides, (tuple, list)) else []
    if len(pair) != 2 or any(isinstance(side, bool) or not isinstance(side, int) for side in pair):
        raise TypeError(f"{expected}; got {window_size!r}")
    if min(pair) < -1:
        raise ValueError(f"{expected}; got {window_size!r}")
    left, right = (None if side == -1 else side for side in pair)
    return left, right


def to_options(
    dropout_p: Number,
    softmax_scale: Number | None,
    causal: bool,
    window_size: Pair,
    softcap: Number,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """The options of ``flash_attn``'s functions as those of `attention`."""
    return {
        "causal": to_bool("causal", causal),
        "window": to_window(window_size),
        "scale": to_number(softmax_scale),
        "softcap": to_number(softcap) or None,
        "alibi_slopes": alibi_slopes,
        "dropout_p": to_number(dropout_p),
        "deterministic": to_bool("deterministic", deterministic) or None,
        "return_lse": to_bool("return_attn_probs", return_attn_probs),
    }
