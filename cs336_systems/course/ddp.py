"""Data parallelism: every process has the whole model and different sequences, and they average their gradients.

Four ways to average, in the order in which the course builds them:

| mode | all-reduces | start |
|---|---|---|
| `naive` | one for each parameter | after the backward pass |
| `flat` | one for all parameters | after the backward pass |
| `overlapped` | one for each parameter | within the backward pass, as soon as its gradient is ready |
| `bucketed` | one for each bucket of parameters | within the backward pass, as soon as its gradients are ready |

The first has the latency of many collectives, and nothing else runs meanwhile. The second removes most of the latency,
the third hides most of the time behind the backward pass, and the last does both.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from .buckets import GradientAverager
from .collectives import broadcast

MODES = {"naive": (0, False), "flat": (math.inf, False), "overlapped": (0, True), "bucketed": (math.inf, True)}
"""For each mode the bytes of a bucket, and whether averaging overlaps with the backward pass."""


class DistributedDataParallel(nn.Module):
    """A model whose gradients are averaged over all processes of the default process group.

    >>> model = DistributedDataParallel(model, mode="bucketed", bucket_mb=25)
    >>> model(inputs).sum().backward()
    >>> model.finish_gradient_synchronization()
    >>> optimizer.step()

    Parameters and buffers begin with the values of rank 0. Buffers that are part of the state dict, such as the running
    statistics of batch norm, get those of rank 0 again before each forward pass in training. Tied weights are averaged
    once. A parameter that no process has a gradient for keeps None.

    Args:
        module: the model, on its device.
        mode: one of `MODES`.
        bucket_mb: MiB of gradients in a bucket, for mode "bucketed" alone; None for no limit.

    Attributes:
        module: the model.

    Raises ValueError for another mode, or a ``bucket_mb`` that is not positive or that the mode does not have.
    """

    def __init__(self, module: nn.Module, *, mode: str = "overlapped", bucket_mb: float | None = None) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}; got {mode!r}")
        if bucket_mb is not None and mode != "bucketed":
            raise ValueError(f"bucket_mb must be None with mode {mode!r}; got {bucket_mb}")
        if bucket_mb is not None and not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be positive; got {bucket_mb}")
        most_bytes, overlap = MODES[mode]
        self.module = module
        broadcast((tensor, 0) for tensor in itertools.chain(module.parameters(), module.buffers()))
        saved = module.state_dict().keys()
        self._changing_buffers = [name for name, _ in module.named_buffers() if name in saved]
        most_bytes = most_bytes if bucket_mb is None else bucket_mb * 2**20
        self._averager = GradientAverager(module.parameters(), most_bytes, overlap)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        if self.training and self._averager.enabled:
            broadcast((self.module.get_buffer(name), 0) for name in self._changing_buffers)
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Wait until ``.grad`` of every parameter is the mean over all processes; call it before the optimizer's step.

        Raises ValueError if a parameter that did not require a gradient at construction has one.
        """
        self._averager.finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes only accumulate gradients: use it for all micro-batches but the last."""
        self._averager.enabled = False
        try:
            yield
        finally:
            self._averager.enabled = True
