"""Gradients averaged over all processes, in buckets: how many collectives there are, and when they start.

A bucket is a list of parameters whose gradients one all-reduce averages. A bucket for each parameter needs many
collectives, each with its latency; one bucket for all can only start when the backward pass is over. In between lies
what torch's DistributedDataParallel does (Li et al., "PyTorch Distributed", 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .collectives import start_mean


class Bucket:
    """Parameters of one dtype and device. Their gradients become views of one flat tensor, which is all-reduced.

    Behind the gradients the flat tensor has a number for each parameter: 1 if this process has a gradient for it, else
    0. A mean of 0 means that no process has one. Then the gradient stays None, as on a single process, and an optimizer
    skips the parameter. If only some have one, the others add zeros.

    Attributes:
        parameters: in the order in which the backward pass should reach them.
        ready: those of them whose gradients the backward pass has accumulated.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.ready: set[nn.Parameter] = set()
        self._missing: list[int] = []
        self._finish: Callable[[], Tensor] | None = None

    def start(self) -> None:
        """Start the all-reduce."""
        self._missing = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
        present = self.parameters[0].new_ones(len(self.parameters))
        for index in self._missing:
            present[index] = 0
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in self.parameters]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), present])
        for parameter, gradient in zip(self.parameters, flat.split(self._sizes)[:-1], strict=True):
            parameter.grad = gradient.view_as(parameter)
        self._finish = start_mean(flat)

    def finish(self) -> None:
        """Wait for the all-reduce. The host waits for a GPU only if a gradient is missing here."""
        if self._finish is None:
            raise RuntimeError("a bucket must be started before it is finished; this one was not")
        flat = self._finish()
        if self._missing:
            present = flat.split(self._sizes)[-1].tolist()
            for index in self._missing:
                if present[index] == 0:
                    self.parameters[index].grad = None
        self._finish = None
        self.ready.clear()

    @property
    def _sizes(self) -> list[int]:
        return [*(parameter.numel() for parameter in self.parameters), len(self.parameters)]


def make_buckets(parameters: Iterable[nn.Parameter], most_bytes: float) -> list[Bucket]:
    """Buckets of at most so many bytes, or of one parameter; in reverse, as the backward pass goes through a model."""
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in reversed([*parameters]):
        kind = parameter.dtype, parameter.device
        if kind not in filling or sum(x.nbytes for x in filling[kind]) + parameter.nbytes > most_bytes:
            filling[kind] = []
            buckets.append(filling[kind])
        filling[kind].append(parameter)
    return [Bucket(parameters) for parameters in buckets]


class GradientAverager:
    """Averages the gradients of parameters over all processes.

    Buckets start in the same order on every process, whatever the order in which their gradients become ready:
    otherwise a process would add one gradient to another's.

    Args:
        parameters: without repetitions, the same on all processes. Those that need no gradient now may not get one
            later.
        most_bytes: of a bucket; 0 for one parameter each, infinity for a single bucket of each dtype.
        overlap: whether a bucket starts within the backward pass, as soon as its gradients and the buckets before it
            are ready; otherwise all start in `finish`.

    Attributes:
        enabled: if False, a backward pass leaves its gradients to be averaged with those of the next.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], most_bytes: float, overlap: bool) -> None:
        parameters = [*parameters]
        self.enabled = True
        self.buckets = make_buckets((x for x in parameters if x.requires_grad), most_bytes)
        self._frozen = [x for x in parameters if not x.requires_grad]
        self._started = 0
        for bucket in self.buckets if overlap else ():
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_ready, bucket))

    def _on_ready(self, bucket: Bucket, parameter: Tensor) -> None:
        """Autograd calls this when it has accumulated a parameter's gradient, once in each backward pass."""
        if not self.enabled:
            return
        assert isinstance(parameter, nn.Parameter)
        if parameter in bucket.ready:
            raise RuntimeError(
                "gradients must be synchronized after each backward pass; got a second one before "
                "finish_gradient_synchronization(). Accumulate gradients within no_sync()"
            )
        bucket.ready.add(parameter)
        while self._started < len(self.buckets) and self._is_ready(self.buckets[self._started]):
            self.buckets[self._started].start()
            self._started += 1

    @staticmethod
    def _is_ready(bucket: Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    def finish(self) -> None:
        """Start what has not been started, and wait for all: then the gradients are means.

        Raises ValueError if a parameter has a gradient that needed none at first.
        """
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ValueError("requires_grad of parameters must be set before they are wrapped; got one set later")
        for bucket in self.buckets[self._started :]:
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()
        self._started = 0
