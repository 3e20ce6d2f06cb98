"""Autocast: which dtype attention computes in, and how its parts keep theirs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Asked once: torch.compile cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "maia") if torch.amp.is_autocast_available(device)
)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on a type of device, None where it is off."""
    if device_type not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, the tensors in its dtype, as torch's ``scaled_dot_product_attention`` takes them."""
    try:
        device = q.device.type
    except AttributeError:
        return q, k, v  # what is no tensor at all is for validation to name
    dtype = autocast_dtype(device)
    return (q, k, v) if dtype is None else (_cast(q, dtype), _cast(k, dtype), _cast(v, dtype))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Autocast leaves float64 alone.
    eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, products keep the dtypes they were written with: accumulation in float32 stays that."""
    return torch.autocast(device.type, enabled=False) if device.type in _AUTOCAST_DEVICES else nullcontext()
