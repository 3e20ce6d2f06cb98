"""The backward's launches before there is a backward, so that its kernels compile while the forward's do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..call import Call, Wanted
from ..launching import Launch
from ..layouts import one_a_row, rows_like
from .backward import backward_kernel
from .backward_rows import finish_kernel, prepare_kernel
from .launches import backward_launch, backward_tiles
from .other_gradients import pair_gradients
from .pair_gradient_launch import pair_gradient_launch
from .pair_gradients import pair_gradient_kernel
from .row_launches import finish_launch, prepare_launch, row_buffers


def backward_launches(call: Call, wanted: Wanted, num_sms: int) -> Iterator[tuple[Any, Launch]]:
    """The kernels with their launches, for a call of tensors without data."""
    q, k, v = call.q, call.k, call.v
    buffers = row_buffers(call)
    memory, workspace = q.new_empty(buffers.elements, dtype=torch.float32), q.new_empty(1, dtype=torch.int32)
    out = rows_like(q, call.v_head_dim).empty(q.dtype, q.device)
    lse = one_a_row(q).empty(torch.float32, q.device)
    dlse = lse if call.return_lse else None
    for dk, dv in backward_tiles(call).launches(k, v):
        yield backward_kernel, backward_launch(call, out, dk, dv, buffers, memory, workspace, num_sms)
    yield prepare_kernel, prepare_launch(call, out, out, lse, dlse, buffers, memory)
    yield finish_kernel, finish_launch(call, q, buffers, memory)
    pairs = pair_gradients(call, buffers, wanted)
    for number, target in enumerate(pairs.new_targets(call.aux) if pairs else ()):
        launch = pair_gradient_launch(call, wanted, out, target, number, buffers, memory, workspace, num_sms)
        yield pair_gradient_kernel, launch
