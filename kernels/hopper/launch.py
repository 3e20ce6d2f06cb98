"""Forward and backward of the kernels for Hopper on tensors (batch, heads, rows, d). Arguments are taken as validated.

Each call goes through Triton's own launcher, which makes the descriptors anew: it costs the host more than a short call
costs the GPU.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from ..layout import rows_like
from ..tuning import processors_of
from .backward import backward_kernel
from .describe import KEYS, Band, Rows, describe_backward, describe_forward
from .forward import forward_kernel
from .rows import finish_kernel, prepare_kernel

ROWS_A_PROGRAM = 64
"""Of the kernels before and after the backward."""


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band) -> tuple[Tensor, Tensor]:
    """out, laid out as q is, and the natural log-sum-exp (batch, heads, q_len) in float32.

    The head dimension is one of `config.FORWARD`, the same for q, k and v; scale is positive, and no axis is empty.
    Rows are contiguous, and addresses and strides multiples of 16 bytes, as the copying unit asks.
    """
    out = rows_like(q, v.shape[-1]).empty(q.dtype, q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    programs = processors_of(q.device)
    describe_forward(q, k, v, out, lse, _counter(q.device), band, scale, programs).of(forward_kernel)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, laid out as they are. dQ's additions come in no fixed order.

    The head dimension is one of `config.BACKWARD`; ``lse`` and ``dlse`` are contiguous, rows of ``dout`` too.
    """
    batch, heads, q_len, head_dim = q.shape
    padded = triton.cdiv(q_len, KEYS) * KEYS
    numbers = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    rows = Rows(
        numbers(batch * heads, padded), numbers(batch * heads, padded), numbers(batch * heads, padded, head_dim)
    )
    dq, dk, dv = (rows_like(x, head_dim).empty(x.dtype, x.device) for x in (q, k, v))
    grid = (batch * heads * padded // ROWS_A_PROGRAM,)
    widths = {"HEAD_DIM": head_dim, "WIDTH": head_dim, "ROWS": ROWS_A_PROGRAM}
    strides = out.stride()[:3], dout.stride()[:3]
    prepare_kernel[grid](out, dout, lse, dlse, *rows, *strides, heads, q_len, padded, **widths)
    describe_backward(q, k, v, dout, rows, (dk, dv), band, scale).of(backward_kernel)
    finish_kernel[grid](rows.sums, dq, dq.stride()[:3], heads, q_len, padded, scale, **widths)
    return dq, dk, dv


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """A number that is 0 whenever a kernel on the current stream begins."""
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream, beside others.
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]
