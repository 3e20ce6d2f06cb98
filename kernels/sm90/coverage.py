"""Which calls the kernels for Hopper compute, by metadata alone. Imports no Triton where there is no GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import tuning
from ..settings import Settings
from .config import WIDTHS, columns_of

ALIGNMENT = 16
"""Bytes that addresses and strides have to be multiples of, for the copying unit."""

LEAST_HEAD_DIM = 40
"""Below, half of a tile's columns and more would be zeros."""

MOST_IN_ORDER = 128
"""Head dimensions up to which a warp of its own adds up the gradient of q, which can wait for its turn."""

MOST_PACKED = 1 << 29
"""Rows of packed sequences: where they end has to be told in numbers below 2 ** 30, and filled up they are more."""

SOFTCAP = "cs336_systems.attention.variants.softcap._softcap"
"""The rule for it."""

STEP = 8
"""What head dimensions have to be multiples of, for rows to be so."""


def why_not_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings) -> str | None:
    """Why the forward of a call is not theirs, or None if it is."""
    return _why_not_here(q.device) or why_not_computed(q, k, v, scale, settings)


def _why_not_here(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"they run on GPUs of compute capability 9.0; got {device}"
    if tuning.is_portable_alone():
        return "the portable kernels are asked for"
    from ..versions import why_not_gluon

    return why_not_gluon()


def why_not_computed(q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings) -> str | None:
    """The same on a GPU that is theirs."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"they compute in float16 and bfloat16; got {q.dtype}"
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    in_range = LEAST_HEAD_DIM <= head_dim <= WIDTHS[-1] and head_dim % STEP == 0 and v_head_dim % STEP == 0
    if not in_range or columns_of(head_dim, v_head_dim) is None:
        expected = f"the same head dimension of q and v, a multiple of {STEP} from {LEAST_HEAD_DIM} to {WIDTHS[-1]}"
        return f"they take {expected}, or up to 192 of q and 128 of v; got {head_dim} and {v_head_dim}"
    if not 0.0 < scale < math.inf:
        return f"they take a positive scale; got {scale}"
    further = ("mask", "scores", "sinks", "dropout", "blocks")
    asked = [name for name in further if getattr(settings, name) not in (None, False, ())]
    if softcap_of(settings) is not None:
        asked.remove("scores")
    if asked:
        return f"they apply causal masks, windows and soft caps; asked for {', '.join(asked)}"
    if q.ndim > 4:
        return f"they take at most one batch axis before the heads'; got {q.ndim - 3}"
    if settings.packed is not None and (reason := _why_not_packed(q, k)) is not None:
        return reason
    if any(0 in x.shape for x in (q, k, v)):
        return "there is nothing to compute"
    return next(
        (reason for name, x in zip("qkv", (q, k, v), strict=True) if (reason := _why_not_copied(name, x))), None
    )


def why_not_backward(q: Tensor, k: Tensor, v: Tensor, scale: float, settings: Settings) -> str | None:
    """The same of its backward; that of out and its gradient is known only then."""
    return why_not_forward(q, k, v, scale, settings) or why_not_differentiated(q, settings)


def why_not_differentiated(q: Tensor, settings: Settings) -> str | None:
    """What else their backward asks for."""
    if settings.deterministic and (settings.packed is not None or q.shape[-1] > MOST_IN_ORDER):
        return (
            "their backward adds up the gradient of q in no fixed order where sequences are packed, or with head "
            f"dimensions above {MOST_IN_ORDER}, and deterministic=True asks for one"
        )
    return None


def softcap_of(settings: Settings) -> float | None:
    """The soft cap of scores, if that is all that becomes of them."""
    if len(settings.scores) != 1:
        return None
    [(name, captured)] = settings.scores
    return captured[0] if name == SOFTCAP else None


def is_copied(x: Tensor) -> bool:
    """Whether the copying unit can copy tiles of a tensor (..., rows, d), but for its address."""
    return _why_not_copied("", x) is None


def is_aligned(*addresses: int) -> bool:
    """Whether it can from these addresses."""
    together = 0
    for address in addresses:
        together |= address
    return together % ALIGNMENT == 0


def _why_not_packed(q: Tensor, k: Tensor) -> str | None:
    if q.ndim == 4 and q.shape[0] != 1:
        return f"they take packed sequences of one entry of a batch; got {q.shape[0]}"
    if max(q.shape[-2], k.shape[-2]) > MOST_PACKED:
        return f"they take at most {MOST_PACKED} rows of packed sequences; got {q.shape[-2]} and {k.shape[-2]}"
    return None


def _why_not_copied(name: str, x: Tensor) -> str | None:
    if x.stride(-1) != 1:
        return f"they need {name} with contiguous rows; its last stride is {x.stride(-1)}"
    step = ALIGNMENT // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % step):
            return f"they need strides of {name} that are multiples of {ALIGNMENT} bytes, and not 0; got {x.stride()}"
    return None
