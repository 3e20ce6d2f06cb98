"""The plan of the statistics of scores, and the launch of their kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from ..call import Aux, Call
from ..launching import Launch, Launcher
from ..layouts import one_a_row
from .halves import Input, Memory, SplitPlan, inputs_of
from .launch import forward_operands
from .problem import Problem, stride_multiples
from .statistics import statistics_kernel
from .tiles import lookup

NO_OPERANDS = (None,) * 4


class StatisticsPlan:
    """Computes the log-sum-exp, the largest score and the entropy of each row of q, contiguous in float32."""

    def __init__(self, call: Call) -> None:
        self.problem = Problem(call)
        self._shape = one_a_row(call.q).shape
        self._sees_nothing = call.is_empty
        self._split = None if self.problem.precision == "half" else SplitPlan([call.q, call.k], self.problem)
        self._launcher = Launcher(statistics_kernel)

    def __call__(self, q: Tensor, k: Tensor, aux: Aux) -> tuple[Tensor, Tensor, Tensor]:
        """Launch the kernel."""
        lse, max_scores, entropy = (torch.empty(self._shape, dtype=torch.float32, device=q.device) for _ in range(3))
        if self._sees_nothing:
            lse.fill_(-math.inf)
            if aux.sinks is not None:
                lse.copy_(aux.sinks[:, None])
            return lse, max_scores.fill_(-math.inf), entropy.zero_()
        memory = None
        if self._split is None:
            inputs: tuple[Any, ...] = (q.data_ptr(), k.data_ptr(), None, None)
        else:
            inputs, memory = self._split([q, k])
        others = _operands(self.problem, aux, Tensor.data_ptr) if self.problem.has_operands else NO_OPERANDS
        results = lse, max_scores, entropy
        self._launcher((*inputs, *[x.data_ptr() for x in results], *others), self._launch, q, k, memory, results, aux)
        return results

    def _launch(self, q: Tensor, k: Tensor, memory: Memory | None, results: tuple[Tensor, ...], aux: Aux) -> Launch:
        return statistics_launch(self.problem, inputs_of([q, k], self._split, memory), results, aux)


def _operands(problem: Problem, aux: Aux, read: Any) -> tuple[Any, ...]:
    sinks, _, *others = forward_operands(problem, aux, read)  # without a seed: nothing is dropped
    return sinks, *others


def statistics_launch(problem: Problem, inputs: list[Input], results: tuple[Tensor, ...], aux: Aux) -> Launch:
    """The launch of `statistics_kernel`; ``inputs`` are q and k, ``results`` lse, the largest scores and entropies.

    It has the forward's tiles, and in place of v's a second stage: with one, float32 of 256 columns spills on Ampere.
    """
    q, k = (x.tensor for x in inputs)
    work = problem.q_len, problem.q_batch_heads
    config = lookup("forward", problem.precision, problem.block, problem.device, *work, problem.with_mods)
    config = dataclasses.replace(config, num_stages=max(2, config.num_stages))
    strides, multiples = stride_multiples([q, k])
    return Launch(
        (config.programs("forward", *work, problem.packed[0]), 1),
        (q, k, *[x.stats for x in inputs], *results, *_operands(problem, aux, lambda tensor: tensor)),
        (
            *(*problem.sizes, *strides, tuple(x.lo_offset for x in inputs), *problem.lengths),
            abs(problem.options.scale),
        ),
        {"C": problem.constants(config), **problem.mods.code(backward=False)}
        | {"BOTTOM_RIGHT": problem.options.bottom_right, "STRIDE_MULTIPLES": multiples}
        | {"FLIP": problem.options.scale < 0},
        # Fused, s * scale - maximum of the largest score would not be 0.
        config.options | {"enable_fp_fusion": False},
    )
