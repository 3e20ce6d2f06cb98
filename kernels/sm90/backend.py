"""The backend for Hopper GPUs: which calls it takes, by metadata alone, and plans that launch its kernels.

Triton is imported only where a GPU of compute capability 9.0 is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..bound_mods import dropout_operand
from ..call import NO_AUX, Aux, Call, Gradients, Options, Wanted
from ..layouts import ALIGNMENT, has_tma_strides, one_a_row
from ..torch_names import raw_stream
from .other_gradients import OtherGradients
from .tiles import HEAD_DIMS, WIDE, BackwardConfig, ForwardConfig, backward_config, split_head_dim

CAPABILITY = (9, 0)

MIN_HEAD_DIM, MIN_IN_BACKWARD = 24, 8
"""Narrower heads are padded to 64 columns. The portable forward of 16 columns, which are not padded, is faster."""

MAX_HEAD_DIM = WIDE.head_dim + WIDE.k_tail

HEAD_DIM_MULTIPLE = 8
"""Head dimensions are multiples of this, so that rows are multiples of `ALIGNMENT` bytes."""

MAX_PACKED_ROWS = 1 << 29
"""Packed rows: sequences end at TMA coordinates below 2**30, and per-row buffers have more rows."""

NO_TAILS: tuple[int | None, ...] = (None, None, None, None)
NO_STARTS = (None, None)
NO_MODS = (None, None, None, None)

MIN_WORKSPACE = 1 << 14
"""Elements of a workspace that is kept."""

_workspaces: dict[tuple[int, int], Tensor] = {}

Forward = Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Aux], Gradients]


def supports(call: Call) -> str | None:
    """None, or why the forward kernel cannot compute a call."""
    return unsupported_device(call.device) or unsupported_call(call)


def supports_backward(call: Call, wanted: Wanted) -> str | None:
    """None, or why the backward kernels cannot. They may follow any backend's forward."""
    return unsupported_device(call.device) or unsupported_call(call, MIN_IN_BACKWARD) or unsupported_backward(call)


def unsupported_device(device: torch.device) -> str | None:
    """None, or why the kernels do not run here."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return f"needs a GPU of compute capability 9.0; got {device}"
    from ..versions import why_not_gluon

    return why_not_gluon()


def unsupported_call(call: Call, least: int = MIN_HEAD_DIM) -> str | None:
    """None, or why the kernels cannot compute a call wherever it is, of at least ``least`` columns."""
    if call.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16; got {call.dtype}"
    dims = call.head_dim, call.v_head_dim
    in_range = call.head_dim >= least and all(dim % HEAD_DIM_MULTIPLE == 0 for dim in dims)
    if not in_range or split_head_dim(*dims) is None:
        return (
            f"needs the same head dimension of q and v, a multiple of {HEAD_DIM_MULTIPLE} from {least} to "
            f"{MAX_HEAD_DIM}, or of q 72 to 96 and of v 40 to 64, or 136 to 192 and 72 to 128, or "
            f"{HEAD_DIMS[-1] + HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM} and fewer; got {dims[0]} of q and {dims[1]} of v"
        )
    if not 0.0 < call.options.scale < math.inf:
        return f"needs a positive scale; got {call.options.scale}"
    if call.aux.cache_lengths is not None:
        return "computes no cache_lengths"
    if call.has_rules and call.q.ndim == 3:
        return "needs an axis of heads for masks and score changes"
    return _unsupported_layout(call)


def unsupported_backward(call: Call) -> str | None:
    """None, or why the kernels cannot compute the gradients of a call whose values they can."""
    if not call.options.deterministic:
        return None
    is_listed = call.aux.block_columns is not None
    for name, is_given in (("packed sequences", call.is_packed), ("listed blocks", is_listed)):
        if is_given:
            return f"adds up dQ of {name} in no fixed order, which deterministic=True needs"
    if not backward_config(call.head_dim, call.v_head_dim).has_turns:
        # Consumer warp groups add dQ to global memory, in no order.
        return "adds up dQ of head dimensions of q and v above 128 in no fixed order, which deterministic=True needs"
    return None


def _unsupported_layout(call: Call) -> str | None:
    q, k = call.q, call.k
    if q.ndim > 4:
        return f"needs at most one batch axis before the heads; got {q.ndim - 3}"
    if call.is_packed and q.ndim == 4 and q.shape[0] != 1:
        return f"needs packed sequences in a batch of 1; got {q.shape[0]}"
    if call.is_packed and max(call.q_len, call.k_len) > MAX_PACKED_ROWS:
        return f"needs at most {MAX_PACKED_ROWS} packed rows; got {call.q_len} of q and {call.k_len} of k"
    if call.is_empty or 0 in call.v.shape:
        return f"needs tensors that are not empty; got q {tuple(q.shape)} and k {tuple(k.shape)}"
    for name, x in zip("qkv", (q, k, call.v), strict=True):
        if x.stride(-1) != 1:
            return f"needs {name} with contiguous rows; its last stride is {x.stride(-1)}"
        if not has_tma_strides(x):
            return f"needs strides of {name} that are positive multiples of {ALIGNMENT} bytes; got {x.stride()}"
    return None if call.is_aligned else f"needs q, k and v that begin at multiples of {ALIGNMENT} bytes"


def plan_forward(call: Call) -> Forward:
    """A function of q, k, v and aux that returns out, laid out like q, and the natural log-sum-exp."""
    from .. import launching

    launching.start_compiler()
    from .forward import forward_kernel
    from .launches import forward_launch, forward_tiles

    options, device, num_sms = call.options, call.device, launching.num_sms(call.device)
    split, config, num_tiles = forward_tiles(call)
    new_out = launching.output_like(call.q, call.v_head_dim)
    lse_shape, is_packed = one_a_row(call.q).shape, call.is_packed
    columns = range(0, call.v_head_dim, split.head_dim + split.v_tail)
    launches = [(launching.Launcher(forward_kernel), slice(first, first + columns.step)) for first in columns]
    operands = _mods_of(call, config)

    def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux = NO_AUX) -> tuple[Tensor, Tensor]:
        out = new_out(q)
        lse = torch.empty(*lse_shape, dtype=torch.float32, device=device)  # a tuple takes longer to parse
        workspace = workspace_for(device, num_tiles)
        starts = _starts(aux) if is_packed else NO_STARTS
        sinks = None if aux.sinks is None else aux.sinks.data_ptr()
        of_rules = operands(aux, aux.block_rows)
        rest = lse.data_ptr(), workspace.data_ptr(), *starts, *of_rules, sinks
        for launch, columns in launches:
            some_v, some_out = (v, out) if len(launches) == 1 else (v[..., columns], out[..., columns])
            tensors = q.data_ptr(), k.data_ptr(), some_v.data_ptr(), some_out.data_ptr()
            tails = NO_TAILS
            if split.k_tail:
                tails = tensors if split.v_tail else (*tensors[:2], None, None)
            described = options, q, k, some_v, aux, some_out, lse, workspace, num_sms
            launch((*tensors, *tails, *rest), _described, forward_launch, *described)
        return out, lse

    return run


def plan_backward(call: Call, out: Tensor, dout: Tensor, has_dlse: bool, wanted: Wanted) -> Backward:
    """A function of q, k, v, out, lse, dout, dlse and aux that returns the gradients of q, k and v.

    out and dout: as ``call``, for their metadata alone. has_dlse: not needed by these kernels.
    """
    from .. import launching
    from .backward import backward_kernel
    from .backward_rows import finish_kernel, prepare_kernel
    from .launches import backward_launch, backward_tiles
    from .row_launches import finish_launch, prepare_launch, row_buffers

    options, device, num_sms = call.options, call.device, launching.num_sms(call.device)
    buffers, config = row_buffers(call), backward_tiles(call)
    elements = buffers.elements
    new_dq, new_dk, new_dv = (launching.output_like(x, x.shape[-1]) for x in (call.q, call.k, call.v))
    copies_dout = not has_tma_strides(dout) or dout.data_ptr() % ALIGNMENT != 0
    copies_out = out.stride(-1) != 1
    operands, others = _mods_of(call, config), OtherGradients(call, buffers, wanted)
    prepare, finish = map(launching.Launcher, (prepare_kernel, finish_kernel))
    launches = [launching.Launcher(backward_kernel) for _ in config.launches(None, None)]

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux = NO_AUX
    ) -> Gradients:
        if copies_dout:
            # Often an expanded scalar.
            dout = dout.clone(memory_format=torch.contiguous_format)
        if copies_out:
            out = out.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
        memory = torch.empty(elements, dtype=torch.float32, device=device)
        workspace = workspace_for(device, 0)
        lse2_ptr, delta_ptr, sums_ptr, turns_ptr = rows = buffers.addresses(memory.data_ptr())
        cu_seqlens_q, _ = starts = _starts(aux)
        dout_ptr, dlse_ptr = dout.data_ptr(), None if dlse is None else dlse.data_ptr()
        inputs = options, q, k, v, aux
        read = out.data_ptr(), dout_ptr, lse.data_ptr(), dlse_ptr, *rows, cu_seqlens_q
        prepare(read, _described, prepare_launch, *inputs, out, dout, lse, dlse, buffers, memory)
        read_by_all = q.data_ptr(), dout_ptr, k.data_ptr(), v.data_ptr(), lse2_ptr, delta_ptr
        rest = (
            *(sums_ptr, turns_ptr if config.has_turns else None),
            *((q.data_ptr(), k.data_ptr(), dk.data_ptr()) if config.k_tail else NO_TAILS[:3]),
            *((dout_ptr, v.data_ptr(), dv.data_ptr()) if config.v_tail else NO_TAILS[:3]),
            *(workspace.data_ptr(), *starts),
            *operands(aux, aux.block_columns),
        )
        for launch, made in zip(launches, config.launches(dk, dv), strict=True):
            addresses = *read_by_all, *map(launching.address_of, made), *rest
            described = *inputs, dout, *made, buffers, memory, workspace, num_sms
            launch(addresses, _described, backward_launch, *described)
        finish((*rows[2:], dq.data_ptr(), cu_seqlens_q), _described, finish_launch, *inputs, dq, buffers, memory)
        return Gradients(dq, dk, dv, *others(q, k, v, out, lse, dout, dlse, memory, workspace, aux))

    return run


def compile_backward(call: Call) -> None:
    """Compile the kernels of a call's backward in the background, but for portable ones of `OtherGradients`."""
    from .. import launching
    from .ahead import backward_launches

    launches = backward_launches(call.without_data(), call.wanted, launching.num_sms(call.device))
    launching.compile_ahead(launches, call.device)


def _described(
    make: Callable[..., Any], options: Options, q: Tensor, k: Tensor, v: Tensor, aux: Aux, *others: Any
) -> Any:
    """The launch that ``make`` describes of a call and other arguments."""
    return make(Call(q, k, v, options, aux), *others)


def _mods_of(
    call: Call, config: ForwardConfig | BackwardConfig
) -> Callable[[Aux, Tensor | None], tuple[Any, Any, Any, Any]]:
    """What gives the operands of a call's rules, tiles of pairs among them, of a list of blocks, and of dropout."""
    from .rule_arguments import bound_mods, pair_tensor

    if not call.depends_on_pairs:
        return lambda aux, lists: NO_MODS
    mods, options, read = bound_mods(call), call.options, Tensor.data_ptr
    pairs = pair_tensor(call) if config.has_pairs else None

    def operands(aux: Aux, lists: Tensor | None) -> tuple[Any, Any, Any, Any]:
        captured, blocks = mods.operands(aux, lists, read)
        tiles = None if pairs is None else pairs.address(aux)
        return captured, tiles, blocks, dropout_operand(options, aux, read)

    return operands


def _starts(aux: Aux) -> tuple[int | None, int | None]:
    """Addresses of where packed sequences begin."""
    if aux.cu_seqlens_q is None or aux.cu_seqlens_k is None:
        return None, None
    return aux.cu_seqlens_q.data_ptr(), aux.cu_seqlens_k.data_ptr()


def workspace_for(device: torch.device, num_tiles: int) -> Tensor:
    """The int32 workspace of kernels on the device's current stream: at least 1 + num_tiles elements.

    Element 0, the tile counter, is 0 whenever a kernel on that stream begins. The others, the links of the forward's
    retry list (`lib.scheduler`), need no initial values.
    """
    if torch.cuda.is_current_stream_capturing():
        # A graph may be replayed on any stream, and at the same time as others.
        return _new_workspace(1 + num_tiles, device)
    # torch.cuda.current_stream makes an object, at a microsecond.
    key = device.index, raw_stream(device.index)
    workspace = _workspaces.get(key)
    if workspace is None or workspace.numel() <= num_tiles:
        workspace = _workspaces[key] = _new_kept_workspace(max(MIN_WORKSPACE, 2 * num_tiles), device)
    return workspace


def _new_workspace(elements: int, device: torch.device) -> Tensor:
    workspace = torch.empty(elements, dtype=torch.int32, device=device)
    workspace[:1].zero_()
    return workspace


def _new_kept_workspace(elements: int, device: torch.device) -> Tensor:
    """A workspace that is kept. Another thread allocates it: CUDA graphs of torch.compile own what this one does."""

    def make() -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.device(device):
            workspace, is_zero = _new_workspace(elements, device), torch.cuda.Event()
            is_zero.record()
        return workspace, is_zero

    with ThreadPoolExecutor(1) as other_thread:
        workspace, is_zero = other_thread.submit(make).result()
    stream = torch.cuda.current_stream(device)
    stream.wait_event(is_zero)
    # A larger one may replace it while kernels that use it are still in the stream.
    workspace.record_stream(stream)
    return workspace
