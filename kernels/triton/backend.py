"""The portable Triton backend: which calls it computes, and plans that compute them. See `attention.dispatch`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..call import MAX_LENGTH, Aux, Call, Gradients, Wanted
from ..language import interpreting
from ..launching import compile_ahead
from ..layouts import rows_like
from ..torch_names import surely
from .decode_launch import DecodePlan
from .plans import BackwardPlan, ForwardPlan
from .statistics_launch import StatisticsPlan

MAX_HEAD_DIM = 1024

MAX_DROPOUT = 0.9999
"""The largest dropout_p below 1 for float32.

Score gradients are split into float16 halves under one scale, and those of kept probabilities are multiplied by
1 / (1 - dropout_p): beyond this, those of a row that keeps nothing fall below float16's smallest numbers.
"""

Forward = Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, Tensor]]
Statistics = Callable[[Tensor, Tensor, Aux], tuple[Tensor, Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "Tensor | None", Aux], Gradients]


def supports(call: Call) -> str | None:
    """Why the forward of a call cannot be computed here; None if it can."""
    reason = _unsupported_here(call) or _unsupported_sizes(call)
    if reason is not None:
        return reason
    return None if call.aux.cache_lengths is None else _unsupported_decoding(call)


def supports_backward(call: Call, wanted: Wanted) -> str | None:
    """Why the backward of a call cannot be computed here; None if it can."""
    if call.aux.cache_lengths is not None:
        return "decoding has no backward"
    return _unsupported_here(call) or _unsupported_sizes(call)


def plan_forward(call: Call) -> Forward:
    """A plan for calls with this metadata: (q, k, v, aux) -> (out laid out like q, lse contiguous float32)."""
    return ForwardPlan(call) if call.aux.cache_lengths is None else DecodePlan(call)


def plan_statistics(call: Call) -> Statistics:
    """A plan for calls with this metadata: (q, k, aux) -> lse, largest scores, entropies, contiguous in float32."""
    return StatisticsPlan(call)


def plan_backward(call: Call, out: Tensor, dout: Tensor, has_dlse: bool, wanted: Wanted) -> Backward:
    """A plan for backwards with this metadata: (q, k, v, out, lse, dout, dlse, aux) -> `Gradients`."""
    del out
    return BackwardPlan(call, dout, has_dlse, wanted)


def compile_backward(call: Call) -> None:
    """Compile the kernels of a call's backward in the background."""
    without_data = call.without_data()
    dout = rows_like(call.q, call.v_head_dim).empty(call.dtype, without_data.device)
    plan = BackwardPlan(call, dout, call.return_lse, call.wanted)
    compile_ahead(plan.launches(without_data, dout), call.device)


def _unsupported_here(call: Call) -> str | None:
    """A reason in the dtype and the device."""
    device, dtype = call.device, call.dtype
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it computes in float16, bfloat16 and float32; got {str(dtype).removeprefix('torch.')}"
    interpreted = interpreting()
    if device.type == "cpu" and interpreted:
        # It multiplies the bit patterns of bfloat16 numbers as integers.
        return "Triton's interpreter computes wrong bfloat16 products" if dtype == torch.bfloat16 else None
    if device.type != "cuda":
        return f"it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got {device}"
    if interpreted:
        return "TRITON_INTERPRET is set, so its kernels run on CPU tensors alone; got cuda"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs a GPU of compute capability 8.0 or newer; {device} has {major}.{minor}"
    return None


def _unsupported_sizes(call: Call) -> str | None:
    """A reason in lengths, head dimensions and dropout."""
    if surely(call.q_len > MAX_LENGTH) or surely(call.k_len > MAX_LENGTH):
        return f"it counts rows in 32 bits, up to {MAX_LENGTH}; got {call.q_len} of q and {call.k_len} of k"
    widest = max(call.head_dim, call.v_head_dim)
    if widest > MAX_HEAD_DIM:
        return f"its head dimensions go up to {MAX_HEAD_DIM}; got {widest}"
    if MAX_DROPOUT < call.options.dropout_p < 1 and call.dtype == torch.float32:
        return f"in float32 its dropout_p goes up to {MAX_DROPOUT}, or is 1; got {call.options.dropout_p}"
    return None


def _unsupported_decoding(call: Call) -> str | None:
    """A reason in the options of a call over a KV cache."""
    options, aux = call.options, call.aux
    given = {
        "score rules": len(options.scores) > 0,
        "a mask": options.mask is not None or aux.block_rows is not None,
        "sinks": aux.sinks is not None,
        "dropout": options.dropout_p > 0,
        "packed sequences": call.is_packed,
        "keys after a query's own": options.window_right != 0 or not options.bottom_right,
    }
    names = [name for name, is_given in given.items() if is_given]
    return f"its decoding kernels take a window and a softcap alone; got {', '.join(names)}" if names else None
