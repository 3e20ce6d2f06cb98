"""The gradients besides those of q, k and v: of sinks, and of what score changes captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..call import Aux, Call, Wanted
from ..lib.reductions import sink_gradient

if TYPE_CHECKING:
    from .launches import RowBuffers

Others = tuple[Tensor | None, tuple[Tensor | None, ...]]
"""The gradients of sinks, and of captured tensors."""


class OtherGradients:
    """Those that are wanted of calls with this metadata; portable kernels compute those of captured tensors."""

    def __init__(self, call: Call, buffers: RowBuffers, wanted: Wanted) -> None:
        self._wanted, self._is_packed, self._q_len, self._buffers = wanted, call.is_packed, call.q_len, buffers
        self._captured = None
        if any(wanted.score_aux):
            from ..triton.captured_gradients import AfterBackward

            self._captured = AfterBackward(call, wanted)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        memory: Tensor, aux: Aux,
    ) -> Others:  # fmt: skip
        """After the backward, whose buffers ``memory`` holds."""
        none = (None,) * len(aux.score_aux)
        if self._captured is None and not self._wanted.sinks:
            return None, none
        if self._is_packed:  # each sequence is padded: its rows lie elsewhere
            delta = (out.float() * dout.float()).sum(-1)
            delta = delta if dlse is None else delta - dlse
        else:
            _, delta, *_ = self._buffers.views(memory)
            delta = delta[:, : self._q_len].reshape(lse.shape).contiguous()
        of_sinks = sink_gradient(aux.sinks, lse, delta) if self._wanted.sinks and aux.sinks is not None else None
        return of_sinks, none if self._captured is None else self._captured(q, k, v, out, lse, dout, dlse, delta, aux)
