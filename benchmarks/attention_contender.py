"""One provider bound to one problem: its tensors, and its forward and backward pass as functions to be timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.attention_presets import Problem
from benchmarks.attention_provider import Attend, Layout, Provider
from cs336_systems.profiling.flops import Pass
from cs336_systems.profiling.memory import MemoryReading, forward_memory, training_memory


@dataclass(frozen=True)
class Tensors:
    """q, k, v and the gradient of the output, (batch, heads, length, d) with the heads axis always there."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output_gradient: torch.Tensor

    @classmethod
    def random(cls, problem: Problem, device: torch.device, seed: int) -> Tensors:
        """Independent normal values: zeros would run faster than real data does."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int) -> torch.Tensor:
            shape = (problem.batch, max(1, heads), problem.length, problem.head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=problem.torch_dtype)

        return cls(draw(problem.heads), draw(problem.kv_heads), draw(problem.kv_heads), draw(problem.heads))

    def laid_out(self, layout: Layout, *, head_axis: bool) -> Tensors:
        """The same values as a provider takes them, contiguous; q, k and v as leaves that require gradients."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if layout == "length first":
                return tensor.transpose(1, 2).contiguous()
            return tensor.squeeze(1) if layout == "as given" and not head_axis else tensor

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return convert(tensor).detach().requires_grad_()

        return Tensors(leaf(self.query), leaf(self.key), leaf(self.value), convert(self.output_gradient))


class Contender:
    """A provider bound to a problem and its tensors."""

    def __init__(self, provider: Provider, problem: Problem, tensors: Tensors, device: torch.device) -> None:
        self.provider = provider
        self._tensors = tensors
        self._device = device
        self._attend: Attend = provider.bind(problem)
        self._training_memory: MemoryReading | None = None

    @contextmanager
    def ready(self, which: Pass) -> Iterator[Callable[[], object]]:
        """Do what the pass needs beforehand, and give the function of which one call is one pass."""
        with self.provider.context():
            if which == "forward":
                with torch.no_grad():
                    yield self._forward
            elif which == "backward":
                output = self._forward()
                yield lambda: self._backward(output, retain_graph=True)
            else:
                yield lambda: self._backward(self._forward())

    def output(self) -> torch.Tensor:
        """The forward pass's output, with the axes in the problem's order: (batch, heads, length, d)."""
        with self.provider.context(), torch.no_grad():
            return self._in_order(self._forward())

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k and v, with the axes in the same order."""
        with self.provider.context():
            return tuple(self._in_order(gradient) for gradient in self._backward(self._forward()))

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.provider.layout == "length first":
            return tensor.transpose(1, 2)
        return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor

    def memory(self, which: Pass) -> MemoryReading:
        """Memory held and at the peak: of the forward alone, or of forward and backward."""
        with self.provider.context():
            if which == "forward":
                with torch.no_grad():
                    return forward_memory(self._forward, device=self._device)
            if self._training_memory is None:
                self._training_memory = training_memory(
                    self._forward, self._backward, inputs=self._inputs, device=self._device
                )
            return self._training_memory

    @property
    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._tensors.query, self._tensors.key, self._tensors.value

    def _forward(self) -> torch.Tensor:
        return self._attend(*self._inputs)

    def _backward(self, output: torch.Tensor, retain_graph: bool = False) -> tuple[torch.Tensor, ...]:
        # Not output.backward(): that would add to .grad, which is one more kernel for each input.
        return torch.autograd.grad(output, self._inputs, self._tensors.output_gradient, retain_graph=retain_graph)


# Relative difference between two right answers, with room to spare: a few roundings of the dtype. What is beyond was
# computed otherwise, with another mask, scale or layout, and its time is no answer to the same question.
_PLAUSIBLE_DIFFERENCE = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 1e-4}
_PLAUSIBLE_DIFFERENCE_TF32 = 5e-3
# Gradients go through more roundings than outputs do.
_MORE_IN_GRADIENTS = 2.0


def plausible_difference(dtype: str, *, gradients: bool, tf32: bool = False) -> float:
    """How large `relative_difference` may be between right answers; ``tf32``: products of float32 may use TF32."""
    allowed = _PLAUSIBLE_DIFFERENCE_TF32 if tf32 and dtype == "float32" else _PLAUSIBLE_DIFFERENCE[dtype]
    return allowed * (_MORE_IN_GRADIENTS if gradients else 1.0)


def relative_difference(tensors: Sequence[torch.Tensor], baseline: Sequence[torch.Tensor]) -> float:
    """The largest ‖tensor − baseline‖ / ‖baseline‖, computed in float32; infinite for what is not a number."""
    ratios = []
    for tensor, expected in zip(tensors, baseline, strict=True):
        difference = (tensor.float() - expected.float()).norm()
        ratio = float(difference / expected.float().norm().clamp_min(torch.finfo(torch.float32).tiny))
        ratios.append(ratio if ratio == ratio else float("inf"))
    return max(ratios)
