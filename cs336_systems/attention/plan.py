"""Plans: what follows from the metadata of calls, made once for a key. Running one passes tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..kernels.call import NO_AUX, Aux, Call, Gradients, Wanted
from ..kernels.layouts import ALIGNMENT
from ..kernels.torch_names import apply_of, current_device, in_forward_mode
from .functions import Plan, TracedPlan

Result = tuple[Tensor, "Tensor | None"]
Run = Callable[[Tensor, Tensor, Tensor, Aux], Result]
KernelForward = Callable[[Tensor, Tensor, Tensor, Aux], tuple[Tensor, Tensor]]
KernelBackward = Callable[..., Gradients]
Kept = TypeVar("Kept")

MAX_PLANS = 4096
"""Plans in a cache; beyond, all are dropped, and made again when they are needed."""


def remember(cache: dict[Hashable, Kept], key: Hashable, plan: Kept) -> Kept:
    """Keep a plan by its key, and return it."""
    if len(cache) >= MAX_PLANS:
        cache.clear()
    cache[key] = plan
    return plan


def differentiable_run(function: Any, plan: Plan, return_lse: bool) -> Run:
    """What computes calls by a plan, through its autograd Function where a gradient may be needed."""
    if isinstance(plan, TracedPlan):  # whose operators have gradients
        return lambda q, k, v, aux: plan.forward(q, k, v, aux) if return_lse else (plan.forward(q, k, v, aux)[0], None)

    apply = apply_of(function)

    def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> Result:
        """out, and the log-sum-exp or None."""
        needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
        differentiable: tuple[Tensor, ...] = ()
        if aux is not NO_AUX:
            differentiable = aux.score_aux if aux.sinks is None else (aux.sinks, *aux.score_aux)
            needs_grad = needs_grad or any(x.requires_grad for x in differentiable)
        # Forward-mode tangents ride on tensors that require no gradient: the Functions refuse them.
        if not ((needs_grad and torch.is_grad_enabled()) or in_forward_mode()):
            out, lse = plan.forward(q, k, v, aux)
            return out, lse if return_lse else None
        result = apply(q, k, v, False, None, return_lse, plan, aux, *differentiable)
        return result if return_lse else (result, None)

    return run


class KernelPlan:
    """What follows from the metadata of a call for the kernels: its forward, and one backward for each gradient layout.

    Args:
        call: one of the calls.
        forward: a backend's plan of its forward.
        plan_backward: (call, out, dout, has_dlse, wanted) to a backend's plan of its backward.
    """

    __slots__ = ("_backwards", "_forward", "_guard", "_plan_backward", "options")

    def __init__(self, call: Call, forward: KernelForward, plan_backward: Callable[..., KernelBackward]) -> None:
        self.options = call.options
        several = call.device.type == "cuda" and torch.cuda.device_count() > 1
        self._guard = call.device if several else None
        self._forward = forward
        self._plan_backward = plan_backward
        self._backwards: dict[Any, KernelBackward] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """out and log-sum-exp."""
        # Triton launches on the current device, wherever the tensors are.
        if self._guard is not None and self._guard.index != current_device():
            with torch.cuda.device(self._guard):
                return self._forward(q, k, v, aux)
        return self._forward(q, k, v, aux)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux,
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        """The gradients. Saved tensors may come back with other strides, through hooks that move them."""
        if self._guard is not None and self._guard.index != current_device():
            with torch.cuda.device(self._guard):
                return self.backward(q, k, v, out, lse, dout, dlse, aux, wanted)
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0, dout.data_ptr() % ALIGNMENT == 0
        key = (
            *(q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()),
            *(aligned, dlse is None, wanted),
        )
        run = self._backwards.get(key)
        if run is None:
            call = Call(q, k, v, self.options, aux)
            run = self._backwards[key] = self._plan_backward(call, out, dout, dlse is not None, wanted)
        return run(q, k, v, out, lse, dout, dlse, aux)
