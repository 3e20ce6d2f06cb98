"""Plans of the forward and of the backward: what follows from a call's metadata. Running one passes addresses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..call import Aux, Call, Gradients, Wanted
from ..launching import Launch, Launcher, address_of, output_like
from ..layouts import one_a_row
from ..lib.reductions import sink_gradient
from .backward import dkdv_kernel, dq_kernel
from .captured_gradients import CapturedGradients
from .forward import forward_kernel
from .halves import Memory, SplitPlan, inputs_of
from .launch import (
    RowTensors,
    backward_operands,
    dkdv_launch,
    dq_launch,
    forward_launch,
    forward_operands,
)
from .problem import Problem

address = Tensor.data_ptr
NO_OPERANDS = (None,) * 5
NO_STATS = (None,) * 4


class ForwardPlan:
    """Computes out, laid out like q, and lse."""

    def __init__(self, call: Call) -> None:
        self.problem = Problem(call)
        self._out, self._lse_shape = output_like(call.q, call.v_head_dim), one_a_row(call.q).shape
        self._sees_nothing = call.is_empty or call.v_head_dim == 0
        tensors = [call.q, call.k, call.v]
        self._split = None if self.problem.precision == "half" else SplitPlan(tensors, self.problem)
        self._launcher = Launcher(forward_kernel)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """Launch the kernel."""
        out = self._out(q)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=q.device)
        if self._sees_nothing:
            lse.fill_(-math.inf)
            return out.zero_(), lse if aux.sinks is None else lse.copy_(aux.sinks[:, None])
        memory = None
        if self._split is None:
            inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr(), None, None, None)
        else:
            inputs, memory = self._split([q, k, v])
        others = forward_operands(self.problem, aux, address) if self.problem.has_operands else NO_OPERANDS
        self._launcher((*inputs, out.data_ptr(), lse.data_ptr(), *others), self._launch, q, k, v, memory, out, lse, aux)
        return out, lse

    def _launch(
        self, q: Tensor, k: Tensor, v: Tensor, memory: Memory | None, out: Tensor, lse: Tensor, aux: Aux
    ) -> Any:
        return forward_launch(self.problem, inputs_of([q, k, v], self._split, memory), out, lse, aux)


class BackwardPlan:
    """Computes the gradients of q, k and v, laid out like them, and those that are wanted besides.

    If v has no columns and dout has one, that is not the gradient of out, but in float32 that of each row's entropy,
    which the scores then get; see `lib.backward.of_entropies`.
    """

    def __init__(self, call: Call, dout: Tensor, has_dlse: bool, wanted: Wanted) -> None:
        self.problem = Problem(call, wanted)
        self._wanted = wanted
        self._new = [output_like(x, x.shape[-1]) for x in (call.q, call.k, call.v)]
        self._row_shape = one_a_row(call.q).shape
        self._sees_nothing = call.is_empty or dout.shape[-1] == 0
        # Usually an expanded scalar: the kernels would read it element by element.
        self._copy_dout = dout.stride(-1) != 1
        tensors = [call.q, call.k, call.v, dout]
        self._split = None if self.problem.precision == "half" else SplitPlan(tensors, self.problem)
        self._of_entropies = call.v_head_dim == 0
        self._bound_dlse = has_dlse and (self._split is not None or self._of_entropies)
        mods = self.problem.mods
        self._row_terms, self._column_terms = mods.computed_by("row"), mods.computed_by("column")
        self._dq, self._dkdv = Launcher(dq_kernel), Launcher(dkdv_kernel)
        self._captured = CapturedGradients(self.problem, self._split)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux
    ) -> Gradients:
        """Launch the kernels."""
        problem = self.problem
        if self._copy_dout:
            dout = dout.contiguous()
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = [new(x) for new, x in zip(self._new, (q, k, v), strict=True)]
        delta, lowered_lse = [torch.empty(self._row_shape, dtype=torch.float32, device=q.device) for _ in range(2)]
        if self._sees_nothing:
            return self._of_nothing(dq, dk, dv, lse, dlse, delta, aux)
        memory = None
        if self._split is None:
            inputs: tuple[Any, ...] = (q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr(), *NO_STATS)
        else:
            inputs, memory = self._split([q, k, v, dout])
        bound = self._bound_of(dlse, dout) if dlse is not None and self._bound_dlse else None
        rows = RowTensors(dlse, bound, lse, lowered_lse, delta)
        buffers = self._captured.new_buffers(aux) if problem.mods.terms else []
        by_rows = by_columns = NO_OPERANDS[1:]
        if problem.has_operands:
            by_rows = backward_operands(problem, aux, aux.block_rows, address)
            by_columns = backward_operands(problem, aux, aux.block_columns, address)
        described = (q, k, v, dout), memory, rows
        read = (*inputs[:3], *inputs[4:], address_of(bound))
        dout_address, row_addresses = inputs[3], (lowered_lse.data_ptr(), delta.data_ptr())
        self._dq(
            (
                *(*read, out.data_ptr(), dout_address, address_of(dlse), lse.data_ptr(), *row_addresses),
                *(dq.data_ptr(), tuple([buffers[term].data_ptr() for term in self._row_terms]), *by_rows),
            ),
            *(self._dq_launch, *described, out, dq, buffers, aux),
        )
        self._dkdv(
            (
                *(*read, dout_address, *row_addresses, dk.data_ptr(), dv.data_ptr()),
                *(tuple([buffers[term].data_ptr() for term in self._column_terms]), *by_columns),
            ),
            *(self._dkdv_launch, *described, dk, dv, buffers, aux),
        )
        self._captured.fill((*read, dout_address), *described, buffers, aux)
        return Gradients(dq, dk, dv, self._sinks(lse, delta, aux), self._captured.reduce(buffers, aux))

    def launches(self, call: Call, dout: Tensor) -> Iterator[tuple[Any, Launch]]:
        """The kernels with their launches, for tensors without data; without those of pairs and distances."""
        q, k, v, aux = call.q, call.k, call.v, call.aux
        lse = one_a_row(q).empty(torch.float32, q.device)
        bound = lse.new_empty(self.problem.kv_batch_heads) if self._bound_dlse else None
        rows = RowTensors(lse if call.return_lse else None, bound, lse, lse, lse)
        buffers = self._captured.new_buffers(aux) if self.problem.mods.terms else []
        memory = None
        if self._split is not None:
            memory = self._split.new_memory(q.device)
            yield from self._split.launches([q, k, v, dout], memory)
        described = (q, k, v, dout), memory, rows
        yield dq_kernel, self._dq_launch(*described, dout, q, buffers, aux)
        yield dkdv_kernel, self._dkdv_launch(*described, k, v, buffers, aux)

    def _bound_of(self, dlse: Tensor, dout: Tensor) -> Tensor:
        """What `RowTensors.dlse_bound` is."""
        sizes = dlse.abs() + dout[..., 0].abs() if self._of_entropies else dlse.abs()
        return sizes.nan_to_num_(0.0, 0.0).view(self.problem.kv_batch_heads, -1).amax(1)

    def _sinks(self, lse: Tensor, delta: Tensor, aux: Aux) -> Tensor | None:
        return sink_gradient(aux.sinks, lse, delta) if self._wanted.sinks and aux.sinks is not None else None

    def _of_nothing(
        self, dq: Tensor, dk: Tensor, dv: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor, aux: Aux
    ) -> Gradients:
        """The gradients where no query sees a key: zeros, but for sinks."""
        delta = delta.zero_() if dlse is None else torch.neg(dlse, out=delta)
        wanted = [*self._wanted.score_aux, *[False] * (len(aux.score_aux) - len(self._wanted.score_aux))]
        zeros = [torch.zeros_like(x) if is_wanted else None for x, is_wanted in zip(aux.score_aux, wanted, strict=True)]
        return Gradients(dq.zero_(), dk.zero_(), dv.zero_(), self._sinks(lse, delta, aux), tuple(zeros))

    def _dq_launch(
        self, inputs: Any, memory: Memory | None, rows: RowTensors, out: Tensor, dq: Tensor, buffers: Any, aux: Aux
    ) -> Any:
        sums = [buffers[term] for term in self._row_terms]
        return dq_launch(self.problem, inputs_of([*inputs], self._split, memory), rows, out, dq, sums, aux)

    def _dkdv_launch(
        self, inputs: Any, memory: Memory | None, rows: RowTensors, dk: Tensor, dv: Tensor, buffers: Any, aux: Aux
    ) -> Any:
        sums = [buffers[term] for term in self._column_terms]
        return dkdv_launch(self.problem, inputs_of([*inputs], self._split, memory), rows, dk, dv, sums, aux)
