"""Checks of public arguments. Messages name the argument, what was expected and what came."""

from __future__ import annotations

import enum
import itertools
import math
import sys

import torch
from torch import Tensor

from ..kernels.torch_names import must_dispatch, surely

FAR = 2**29
"""Window sides from here on are clamped before they are compared with symbolic lengths."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

Window = tuple[int | None, int | None]
"""(before, after): how many keys before and after its own position a query sees; None for all."""


class Implementation(str, enum.Enum):
    """What ``impl`` names."""

    FLASH = "flash"
    SDPA = "sdpa"
    COMPILED = "compiled"
    TILED = "tiled"
    NAIVE = "naive"


# A tuple, because torch.compile cannot iterate over an enum.
IMPLEMENTATIONS = ("auto", *(implementation.value for implementation in Implementation))


def parse_implementation(impl: str | Implementation) -> Implementation | None:
    """The implementation that ``impl`` names; None for "auto"."""
    if isinstance(impl, Implementation):
        return impl  # making a member of another is more than torch.compile of torch 2.11 can trace
    expected = ", ".join(map(repr, IMPLEMENTATIONS))
    if not isinstance(impl, str):
        raise TypeError(f"impl must be one of {expected}; got {impl!r} of type {type(impl).__name__}")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {expected}; got {impl!r}")
    return None if impl == "auto" else Implementation(impl)


def check_causal(causal: bool | str) -> str | None:
    """ "bottom_right", "top_left", or None where nothing is hidden."""
    choices = "True, False, 'top_left' or 'bottom_right'"
    if isinstance(causal, bool):
        return "bottom_right" if causal else None
    if not isinstance(causal, str):
        raise TypeError(f"causal must be {choices}; got {causal!r} of type {type(causal).__name__}")
    if causal not in ("top_left", "bottom_right"):
        raise ValueError(f"causal must be {choices}; got {str(causal)!r}")
    return causal


def window_sides(causal: str | None, window: Window, q_len: int, k_len: int) -> tuple[int | None, int | None, bool]:
    """window_left, window_right and bottom_right of `Options`, for sequences up to these lengths."""
    before, after = window
    bottom_right = causal != "top_left"
    lengths = (k_len, q_len) if bottom_right else (q_len, k_len)
    right = 0 if causal is not None else clamp_side(after, lengths[1])
    return clamp_side(before, lengths[0]), right, bottom_right


def check_scale(scale: float | None) -> float | None:
    """The scale, if it is None or a finite number."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a float or None; got {scale!r} of type {type(scale).__name__}")
    if abs(scale) > sys.float_info.max or scale != scale:
        raise ValueError(f"scale must be finite; got {str(scale)[:20]}")
    return float(scale)


def default_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim): scores of unit-variance queries and keys keep unit variance (Vaswani et al., 2017)."""
    return 1.0 / math.sqrt(head_dim)


def check_window(window: Window | None) -> Window:
    """(before, after), each None or an integer from 0 on."""
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


def positive(name: str, value: float | None) -> float | None:
    """The value, if it is None or a finite number above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a float or None; got {value!r} of type {type(value).__name__}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite; got {value}")
    return float(value)


def probability(value: float) -> float:
    """``dropout_p``, if it is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"dropout_p must be a float; got {value!r} of type {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1; got {value}")
    return float(value)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtypes, devices and shapes of q, k and v."""
    check_tensors(q=q, k=k, v=v)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have dtype {q.dtype} to match q; got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} to match q; got {tensor.device}")
    has_heads = q.ndim >= 4
    if q.shape[-1] == 0:
        raise ValueError(f"q must have a head dimension of at least 1; got {shape_of(q)}")
    leading = q.shape[:-3] if has_heads else q.shape[:-2]
    if k.ndim != q.ndim or k.shape[: len(leading)] != leading or k.shape[-1] != q.shape[-1]:
        expected = _shape(*leading, *(["kv_heads"] if has_heads else []), "*", q.shape[-1])
        raise ValueError(f"k must have shape {expected} to match q; got {shape_of(k)}")
    if v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have shape {_shape(*k.shape[:-1], '*')} to match k; got {shape_of(v)}")
    if v.shape[-1] == 0:
        raise ValueError(f"v must have a head dimension of at least 1; got {shape_of(v)}")
    if has_heads:
        q_heads, kv_heads = q.shape[-3], k.shape[-3]
        if (kv_heads == 0) != (q_heads == 0) or (kv_heads and q_heads % kv_heads):
            raise ValueError(f"k must have a number of heads that divides q's {q_heads}; got {kv_heads}")


_LENGTHS = "lengths must be (batch,) int32 or int64 numbers"


def check_lengths(lengths: Tensor) -> Tensor:
    """``lengths`` of `attention_with_cache`, if it is a tensor."""
    if not isinstance(lengths, Tensor):
        raise TypeError(f"{_LENGTHS}; got {type(lengths).__name__}")
    return lengths


def check_cache(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """What a KV cache asks for besides what `attention` does."""
    check_qkv(q, k, v)
    if q.ndim != 4:
        raise ValueError(f"q must have shape (batch, q_heads, new, d); got {shape_of(q)}")
    if lengths.dtype not in INTEGERS:
        raise TypeError(f"{_LENGTHS}; got {lengths.dtype}")
    if tuple(lengths.shape) != (q.shape[0],):
        raise ValueError(f"lengths must have shape ({q.shape[0]},) to match q; got {shape_of(lengths)}")
    if lengths.device != q.device:
        raise ValueError(f"lengths must be on {q.device} to match q; got {lengths.device}")
    check_cache_values(q, k, v, lengths)


def check_cache_values(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
    """What a KV cache asks for that does not follow from shapes, dtypes and devices."""
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        raise ValueError(
            "q, k and v must need no gradients: attention over a cache has no backward pass; "
            "call it under torch.no_grad(), or attention()"
        )
    if lengths.device.type != "cpu" or must_dispatch(lengths):
        return  # only the device knows the numbers, and asking would wait for it
    numbers: list[int] = lengths.tolist()
    if numbers and (min(numbers) < 0 or max(numbers) > k.shape[-2]):
        got = numbers if len(numbers) < 20 else f"{min(numbers)} to {max(numbers)}"
        raise ValueError(f"lengths must be from 0 to {k.shape[-2]}, the slots of k; got {got}")


def check_tensors(**tensors: Tensor) -> None:
    """Each must be a dense floating-point tensor of at least two dimensions."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must have a dtype of {expected}; got {tensor.dtype}")
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor; got {kind}")
        if tensor.ndim < 2:
            raise ValueError(f"{name} must have at least 2 dimensions (length, head_dim); got {shape_of(tensor)}")


def shape_of(tensor: Tensor) -> str:
    """A shape as messages write it: (2, 8, 128, 64)."""
    return _shape(*tensor.shape)


def _shape(*sizes: object) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def smallest_of(x: int, y: int) -> int:
    """min(x, y). torch 2.11 does not compile `torch.sym_min` of numbers."""
    return min(x, y) if type(x) is int and type(y) is int else torch.sym_min(x, y)


def largest_of(x: int, y: int) -> int:
    """max(x, y), likewise."""
    return max(x, y) if type(x) is int and type(y) is int else torch.sym_max(x, y)


def check_starts(name: str, starts: Tensor, device: torch.device, of: str) -> None:
    """cu_seqlens: (sequences + 1,) integers on the device of the tensor ``of``."""
    expected = f"cu_seqlens_{name} must be (sequences + 1,) int32 or int64 numbers"
    if not isinstance(starts, Tensor):
        raise TypeError(f"{expected}; got {type(starts).__name__}")
    if starts.dtype not in INTEGERS:
        raise TypeError(f"{expected}; got {starts.dtype}")
    if starts.ndim != 1 or starts.numel() < 2:
        raise ValueError(f"{expected}, at least 2 of them; got shape {shape_of(starts)}")
    if starts.device != device:
        raise ValueError(f"cu_seqlens_{name} must be on {device} to match {of}; got {starts.device}")


def lengths_of(name: str, starts: Tensor, most: int | None, rows: int | None = None) -> list[int]:
    """The lengths of sequences, from cu_seqlens, which are looked at: this waits for a device.

    Args:
        most: the bound that was given for them.
        rows: how many rows there are; any number if None.
    """
    numbers: list[int] = starts.tolist()
    lengths = [stop - start for start, stop in itertools.pairwise(numbers)]
    if numbers[0] != 0 or min(lengths) < 0 or (rows is not None and numbers[-1] > rows):
        rule = "from 0 on and never decrease"
        if rows is not None:
            rule = f"from 0 on, never decrease, and end at {name}'s {rows} rows at most"
        raise ValueError(f"cu_seqlens_{name} must count {rule}; got {numbers if len(numbers) < 20 else 'others'}")
    if most is not None and max(lengths) > most:
        raise ValueError(f"max_seqlen_{name} must be at least {max(lengths)}, the longest sequence; got {most}")
    return lengths


def check_starts_match(q_starts: Tensor, k_starts: Tensor) -> None:
    """Both are of equally many sequences."""
    if q_starts.shape != k_starts.shape:
        raise ValueError(
            f"cu_seqlens_k must have shape {shape_of(q_starts)} to match cu_seqlens_q; got {shape_of(k_starts)}"
        )


def clamp_side(side: int | None, length: int) -> int | None:
    """A side of a window that hides the same in sequences of this length: None if it hides nothing.

    Kernels count in 32 bits; the caller may give any integer from 0 on.
    """
    if side is None or surely(side >= length - 1):
        return None
    return side if side < FAR else smallest_of(min(side, FAR**2), length)
