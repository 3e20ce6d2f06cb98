"""The gradients besides those of q, k and v: of sinks, and of what score changes captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..call import Aux, Call, Wanted
from ..lib.reductions import sink_gradient

if TYPE_CHECKING:
    from .pair_gradient_launch import PairGradients
    from .row_launches import RowBuffers

MAX_PAIR_HEAD_DIM = 128
"""Columns of tiles: above, those of a step do not fit into shared memory."""

Others = tuple[Tensor | None, tuple[Tensor | None, ...]]
"""The gradients of sinks, and of captured tensors."""


def pair_gradients(call: Call, buffers: RowBuffers, wanted: Wanted) -> PairGradients | None:
    """Those of captured tensors by the kernel for Hopper; None if none are wanted, or it cannot compute them."""
    if not any(wanted.score_aux) or call.is_packed or buffers.head_dim > MAX_PAIR_HEAD_DIM:
        return None
    from .pair_gradient_launch import PairGradients

    return PairGradients(call, buffers, wanted)


class OtherGradients:
    """Those that are wanted of calls with this metadata.

    Portable kernels compute those of captured tensors where there are packed sequences or more than `MAX_PAIR_HEAD_DIM`
    columns.
    """

    def __init__(self, call: Call, buffers: RowBuffers, wanted: Wanted) -> None:
        self._wanted, self._is_packed, self._q_len, self._buffers = wanted, call.is_packed, call.q_len, buffers
        self._pairs, self._captured = pair_gradients(call, buffers, wanted), None
        if any(wanted.score_aux) and self._pairs is None:
            from ..triton.captured_gradients import AfterBackward

            self._captured = AfterBackward(call, wanted)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        memory: Tensor, workspace: Tensor, aux: Aux,
    ) -> Others:  # fmt: skip
        """After the backward, whose buffers ``memory`` holds."""
        found: tuple[Tensor | None, ...] = (None,) * len(aux.score_aux)
        if self._pairs is not None:
            found = self._pairs(q, k, v, dout, memory, workspace, aux)
        if self._captured is None and not self._wanted.sinks:
            return None, found
        if self._is_packed:  # each sequence is padded: its rows lie elsewhere
            delta = (out.float() * dout.float()).sum(-1)
            delta = delta if dlse is None else delta - dlse
        else:
            _, delta, *_ = self._buffers.views(memory)
            delta = delta[:, : self._q_len].reshape(lse.shape).contiguous()
        of_sinks = sink_gradient(aux.sinks, lse, delta) if self._wanted.sinks and aux.sinks is not None else None
        if self._captured is not None:
            found = self._captured(q, k, v, out, lse, dout, dlse, delta, aux)
        return of_sinks, found
