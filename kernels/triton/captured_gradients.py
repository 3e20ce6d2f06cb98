"""The gradients of what score rules captured: buffers, passes that fill those of pairs and distances, reductions.

The passes of dQ, dK and dV fill the others, those of tensors that differ along rows or columns alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Aux, Call, Wanted
from ..launching import Launcher, address_of
from ..lib.softmax import LARGE, SLACK
from .backward import dkdv_kernel, dq_kernel
from .halves import Memory, SplitPlan, inputs_of
from .launch import RowTensors, backward_operands, band_size, dkdv_launch, dq_launch, pair_launch
from .mod_gradients import empty_buffer, reduce_buffer
from .pair_gradients import pair_gradient_kernel
from .problem import Problem

address = Tensor.data_ptr
PASSES = ("pair", "distance")


class CapturedGradients:
    """Of the terms of a problem, in their order; ``split`` says how float32 inputs are split."""

    def __init__(self, problem: Problem, split: SplitPlan | None) -> None:
        self._problem, self._split, self._band_size = problem, split, band_size(problem)
        self._passes = [(term, Launcher(pair_gradient_kernel)) for term in problem.mods.computed_by(*PASSES)]

    def new_buffers(self, aux: Aux) -> list[Tensor]:
        """A buffer for each term, not initialised."""
        problem = self._problem
        lengths = problem.q_len, problem.k_len
        return [empty_buffer(term, problem.shape, lengths, self._band_size, aux) for term in problem.mods.terms]

    def fill(
        self,
        read: tuple[int | None, ...],
        inputs: tuple[Tensor, ...],
        memory: Memory | None,
        rows: RowTensors,
        buffers: list[Tensor],
        aux: Aux,
    ) -> None:
        """Launch the passes; ``read`` has the addresses of what they read of ``inputs``: q, k, v and dout."""
        if not self._passes:
            return
        seed, captured, _, packed = backward_operands(self._problem, aux, None, address)
        of_rows = rows.lowered_lse.data_ptr(), rows.delta.data_ptr()
        for term, launcher in self._passes:
            operands = (*read, *of_rows, buffers[term].data_ptr(), seed, captured, packed)
            launcher(operands, self._launch, inputs, memory, rows, term, buffers[term], aux)

    def reduce(self, buffers: list[Tensor], aux: Aux) -> tuple[Tensor | None, ...]:
        """The gradients, None for tensors without a term."""
        gradients: list[Tensor | None] = [None] * len(aux.score_aux)
        for term, buffer in zip(self._problem.mods.terms, buffers, strict=True):
            gradients[term.position] = reduce_buffer(term, buffer, self._problem.shape, aux)
        return tuple(gradients)

    def _launch(self, inputs: Any, memory: Memory | None, rows: RowTensors, term: int, target: Tensor, aux: Aux) -> Any:
        return pair_launch(self._problem, inputs_of([*inputs], self._split, memory), rows, term, target, aux)


class AfterBackward:
    """The gradients of what score rules captured, after another backend's backward of 16-bit inputs.

    `dq_kernel` and `dkdv_kernel`, which then compute no other gradients, sum the terms along rows and columns.
    """

    def __init__(self, call: Call, wanted: Wanted) -> None:
        self._problem = problem = Problem(call, wanted)
        self._gradients = CapturedGradients(problem, None)
        self._row_terms, self._column_terms = problem.mods.computed_by("row"), problem.mods.computed_by("column")
        self._by_rows, self._by_columns = Launcher(dq_kernel), Launcher(dkdv_kernel)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
        delta: Tensor, aux: Aux,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """lse: as the forward gives it. delta: rowsum(out * dout) - dlse of each row. Both contiguous, as is dlse."""
        slack = torch.where(lse > 0, 1.0 - SLACK.value, 1.0 + SLACK.value)
        lowered = torch.where(lse.abs() < LARGE.value, lse, lse * slack).masked_fill(lse == torch.inf, torch.nan)
        rows = RowTensors(dlse, None, lse, lowered, delta)
        inputs, buffers = (q, k, v, dout), self._gradients.new_buffers(aux)
        read = q.data_ptr(), k.data_ptr(), v.data_ptr(), *(None,) * 5
        of_rows = lowered.data_ptr(), delta.data_ptr()
        if self._row_terms:  # stores lowered and delta again
            sums = [buffers[term] for term in self._row_terms]
            self._by_rows(
                (
                    *(*read, out.data_ptr(), dout.data_ptr(), address_of(dlse), lse.data_ptr(), *of_rows, None),
                    *(tuple(map(address, sums)), *backward_operands(self._problem, aux, aux.block_rows, address)),
                ),
                *(self._row_launch, inputs, rows, out, sums, aux),
            )
        if self._column_terms:
            sums = [buffers[term] for term in self._column_terms]
            self._by_columns(
                (
                    *(*read, dout.data_ptr(), *of_rows, None, None, tuple(map(address, sums))),
                    *backward_operands(self._problem, aux, aux.block_columns, address),
                ),
                *(self._column_launch, inputs, rows, sums, aux),
            )
        self._gradients.fill((*read, dout.data_ptr()), inputs, None, rows, buffers, aux)
        return self._gradients.reduce(buffers, aux)

    def _row_launch(self, inputs: Any, rows: RowTensors, out: Tensor, sums: list[Tensor], aux: Aux) -> Any:
        return dq_launch(self._problem, inputs_of([*inputs], None, None), rows, out, None, sums, aux)

    def _column_launch(self, inputs: Any, rows: RowTensors, sums: list[Tensor], aux: Aux) -> Any:
        return dkdv_launch(self._problem, inputs_of([*inputs], None, None), rows, None, None, sums, aux)
