"""What an implementation returns for some inputs, and the gradients that it gives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .features import Features, leaves_of
from .inputs import Inputs

Attend = Callable[..., "Tensor | tuple[Tensor, Tensor]"]
"""Attention of q, k, v and features by name, its settings already bound: out, or (out, lse)."""
Results = dict[str, Tensor]
"""By name: out, lse if there is one, dq, dk, dv, and the gradients of features (see `features`)."""


def evaluate(attend: Attend, inputs: Inputs, features: Features | None = None) -> Results:
    """What ``attend`` returns for these inputs, and the gradients of q, k and v, as the very tensors given.

    And those of the features that require one.
    """
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    given, further = leaves_of(features or {})
    returned = attend(*leaves, **given)
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    gradients = torch.autograd.grad(outputs, (*leaves, *further.values()), (inputs.dout, inputs.dlse)[: len(outputs)])
    values = (*outputs, *[None] * (2 - len(outputs)), *gradients)
    named = zip(("out", "lse", "dq", "dk", "dv", *further), values, strict=True)
    return {name: x.detach() for name, x in named if x is not None}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that torch hands out uninitialised is full of NaN, so that results nobody wrote are seen."""
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # Filling is all that is wanted: what is not deterministic may stay so.
            warnings.filterwarnings("ignore", message="(?s).*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = filled
