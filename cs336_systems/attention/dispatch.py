"""Which backend computes a call: a flat list, asked in order. No backend knows another."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import Call, Wanted, plan_caches
from ..kernels.language import interpreting
from ..kernels.torch_names import constant_when_traced, must_dispatch
from . import naive, op, tiled
from .backends import SDPA, Backend, Compiled, Naive, why_not_decode
from .functions import FlashAttentionFunction, Plan, TiledAttentionFunction, TracedPlan
from .plan import KernelBackward, KernelPlan, Run, differentiable_run, remember
from .validation import Implementation, parse_implementation

TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None


class KernelBackend(Backend):
    """Kernels in ``cs336_systems.kernels.<name>.backend``, imported when the first call asks for them."""

    implementation = Implementation.FLASH

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: ModuleType | None = None

    @property
    def module(self) -> Any:
        """The package's backend module."""
        _load(self.name)
        return self.loaded

    def passed_over(self, call: Call) -> str | None:
        return None if call.device.type == "cuda" else "interpreted kernels are slow, and only run if asked for"

    def supports(self, call: Call) -> str | None:
        return _why_not_triton(call.device) or self.module.supports(call)

    def supports_backward(self, call: Call, wanted: Wanted) -> str | None:
        """Why it cannot compute the backward of a call, whose forward may be another backend's; None if it can."""
        return _why_not_triton(call.device) or self.module.supports_backward(call, wanted)

    def plan(self, call: Call) -> Run:
        return differentiable_run(FlashAttentionFunction, differentiable_plan(self, call), call.return_lse)


class Tiled(Backend):
    """FlashAttention-2 in plain PyTorch."""

    name = "tiled"
    implementation = Implementation.TILED

    def passed_over(self, call: Call) -> str | None:
        if _is_excluded(NAIVE) or not naive.is_faster_than_tiled(call):
            return None
        return f"'naive' is faster on cpu while its scores take at most {naive.MOST_SCORES_ON_CPU >> 20} MiB"

    def supports(self, call: Call) -> str | None:
        return why_not_decode(call)

    def plan(self, call: Call) -> Run:
        return differentiable_run(TiledAttentionFunction, differentiable_plan(self, call), call.return_lse)


PORTABLE = KernelBackend("triton")
KERNELS = (KernelBackend("sm90"), PORTABLE)
"""The most general ones last."""
NAIVE = Naive()
OTHERS: tuple[Backend, ...] = (SDPA(), Tiled(), Compiled(), NAIVE)
BACKENDS: tuple[Backend, ...] = (*KERNELS, *OTHERS)
"""In the order in which they are asked."""
_WHILE_TRACED: tuple[Backend, ...] = (*KERNELS[::-1], *OTHERS)
"""The operator chooses among the kernels when it runs: sizes may be symbolic before, and tensors have no addresses."""


@constant_when_traced
def _load(name: str) -> None:
    """Import a backend's module. torch.compile traces no import; it calls this as it is."""
    for backend in KERNELS:
        if backend.name == name and backend.loaded is None:
            backend.loaded = importlib.import_module(f"..kernels.{name}.backend", __package__)


plans: dict[Hashable, Run] = {}
_kernel_plans: dict[Hashable, KernelPlan] = {}
plan_caches += [plans, _kernel_plans]

_allowed: tuple[str, ...] | None = None


@contextmanager
def use_backends(*names: str) -> Iterator[None]:
    """Inside, calls are computed by these backends alone, on all threads: for tests and comparisons.

    Raises:
        ValueError: a name is not one of `BACKENDS`.
    """
    global _allowed
    known = [backend.name for backend in BACKENDS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"names must be of {', '.join(known)}; got {unknown[0]!r}")
    before, _allowed = _allowed, names
    clear_plans()
    try:
        yield
    finally:
        _allowed = before
        clear_plans()


def clear_plans() -> None:
    """Forget all plans: what they depend on besides a call's metadata has changed."""
    for cache in plan_caches:
        cache.clear()


def _is_excluded(backend: Backend) -> bool:
    return _allowed is not None and backend.name not in _allowed


def supports(backend: Backend, call: Call) -> str | None:
    """Why a backend does not compute a call, or None if it does."""
    if _is_excluded(backend):
        return f"use_backends() allows only {', '.join(_allowed or ())}"
    return backend.supports(call)


def choose(
    call: Call, impl: str | Implementation = "auto", why_not: Callable[[Backend, Call], str | None] = supports
) -> Backend:
    """The backend that computes a call.

    Args:
        why_not: why a backend does not compute what is asked of a call, None if it does; `attention`'s unless given.

    Raises:
        ValueError: ``impl`` names an implementation that cannot compute the call.
    """
    implementation = parse_implementation(impl)
    reasons = []
    for backend in _WHILE_TRACED if must_dispatch(call.q, call.k, call.v) else BACKENDS:
        if implementation is None and backend.passed_over(call) is not None:
            continue
        if implementation is not None and backend.implementation is not implementation:
            continue
        reason = why_not(backend, call)
        if reason is None:
            return backend
        reasons.append((backend.name, reason))
    if implementation is None:
        raise ValueError(f"no backend can compute this call: {'; '.join(': '.join(pair) for pair in reasons)}")
    # Other kernels say which GPU they are for; the most general ones say what keeps the call from all.
    reason = dict(reasons).get(PORTABLE.name, reasons[-1][1])
    raise ValueError(f"impl={implementation.value!r} cannot compute this call: {reason}")


def choose_backward(call: Call, wanted: Wanted) -> tuple[KernelBackend, dict[str, str]]:
    """The backend of kernels that computes the gradients ``wanted`` of a call, and why not those before it.

    Raises:
        ValueError: none can.
    """
    refused: dict[str, str] = {}
    for backend in KERNELS:
        if not _is_excluded(backend):
            reason = backend.supports_backward(call, wanted)
            if reason is None:
                return backend, refused
            refused[backend.name] = reason
    raise ValueError(f"no backend can differentiate this call: {'; '.join(refused.values())}")


def _why_not_triton(device: torch.device) -> str | None:
    """What is known without importing Triton."""
    if not TRITON_IS_INSTALLED:
        return "it needs the package triton, which is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        return f"it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got {device}"
    return None


def differentiable_plan(backend: Backend, call: Call) -> Plan:
    """The plan of a call for the autograd Functions."""
    implementation = backend.implementation.value
    if must_dispatch(call.q, call.k, call.v, *call.aux.tensors):
        return TracedPlan(implementation, call.options)
    return eager_plan(implementation, call)


def eager_plan(implementation: str, call: Call) -> Plan:
    """The plan of a call that nothing traces, by "flash" or "tiled"."""
    return kernel_plan(call) if implementation == "flash" else tiled.TiledPlan(call.options)


def kernel_plan(call: Call) -> KernelPlan:
    """The plan of a call for the kernels, made once for its key.

    Raises:
        ValueError: no kernels can compute the call.
    """
    key = call.key
    if (plan := _kernel_plans.get(key)) is not None:
        return plan
    reason = None
    for backend in KERNELS:
        reason = supports(backend, call)
        if reason is None:
            plan = KernelPlan(call, backend.module.plan_forward(call), _plan_backward)
            if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v, *call.aux.tensors)):
                _compile_backward(call)
            return remember(_kernel_plans, key, plan)
    raise ValueError(f"the flash kernels cannot compute this call: {reason}")


def _compile_backward(call: Call) -> None:
    """Compile the kernels of a call's backward in the background; the backward raises if there are none."""
    try:
        backend, _ = choose_backward(call, call.wanted)
    except ValueError:
        return
    backend.module.compile_backward(call)


def _plan_backward(call: Call, out: Tensor, dout: Tensor, has_dlse: bool, wanted: Wanted) -> KernelBackward:
    backend, _ = choose_backward(call, wanted)
    plan: KernelBackward = backend.module.plan_backward(call, out, dout, has_dlse, wanted)
    return plan


op.register("flash", eager_plan, ("CUDA", "CPU"))
op.register("tiled", eager_plan, ("CompositeExplicitAutograd",))
