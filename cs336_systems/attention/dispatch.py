"""Which backend computes a call: a flat list, asked in order. No backend knows another."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..kernels.call import ALIGNMENT, NO_AUX, Aux, Call, Gradients, Wanted, plan_caches
from ..kernels.torch_names import apply_of, constant_when_traced, current_device, in_forward_mode, must_dispatch
from . import naive, op, sdpa, tiled
from .functions import FlashAttentionFunction, Plan, TiledAttentionFunction, TracedPlan

Result = tuple[Tensor, "Tensor | None"]
Run = Callable[[Tensor, Tensor, Tensor, Aux], Result]

TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None


class Implementation(str, enum.Enum):
    """What ``impl`` names."""

    FLASH = "flash"
    SDPA = "sdpa"
    COMPILED = "compiled"
    TILED = "tiled"
    NAIVE = "naive"


# Written out because torch.compile cannot iterate over an enum.
IMPLEMENTATIONS = tuple(Implementation)
NAMES = ("auto", *(implementation.value for implementation in IMPLEMENTATIONS))


class Backend:
    """One way to compute attention.

    Attributes:
        name: what `explain` calls it.
        implementation: the ``impl`` that asks for it.
        auto: the device types where ``impl="auto"`` asks it; None for all.
    """

    name: str
    implementation: Implementation
    auto: tuple[str, ...] | None = None

    def supports(self, call: Call) -> str | None:
        """Why this backend cannot compute a call, or None if it can."""
        raise NotImplementedError

    def plan(self, call: Call) -> Run:
        """What computes calls with the metadata of this one."""
        raise NotImplementedError


class KernelBackend(Backend):
    """Kernels in ``cs336_systems.kernels.<name>.backend``, imported when the first call asks for them."""

    implementation = Implementation.FLASH
    auto = ("cuda",)

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: ModuleType | None = None

    @property
    def module(self) -> Any:
        """The package's backend module."""
        _load(self.name)
        return self.loaded

    def supports(self, call: Call) -> str | None:
        return _why_not_triton(call.device) or self.module.supports(call)

    def supports_backward(self, call: Call) -> str | None:
        """The same of its backward, whose forward may be another backend's."""
        return _why_not_triton(call.device) or self.module.supports_backward(call)

    def plan(self, call: Call) -> Run:
        return _differentiable(FlashAttentionFunction, self, call)


class SDPA(Backend):
    """torch's scaled_dot_product_attention."""

    name = "sdpa"
    implementation = Implementation.SDPA

    def supports(self, call: Call) -> str | None:
        return sdpa.supports(call)

    def plan(self, call: Call) -> Run:
        options = call.options
        return lambda q, k, v, aux: (sdpa.sdpa(q, k, v, options), None)


class Tiled(Backend):
    """FlashAttention-2 in plain PyTorch."""

    name = "tiled"
    implementation = Implementation.TILED

    def supports(self, call: Call) -> str | None:
        return _why_not_decode(call)

    def plan(self, call: Call) -> Run:
        return _differentiable(TiledAttentionFunction, self, call)


class Compiled(Backend):
    """The naive formula through torch.compile; only on request, since compiling takes seconds."""

    name = "compiled"
    implementation = Implementation.COMPILED
    auto = ()

    def supports(self, call: Call) -> str | None:
        if op.transforming():
            return "torch.func does not transform what torch.compile made; compile the transform, of impl='naive'"
        return _why_not_decode(call)

    def plan(self, call: Call) -> Run:
        options, return_lse = call.options, call.return_lse
        function = naive.naive if torch.compiler.is_compiling() else naive.compiled
        return lambda q, k, v, aux: function(q, k, v, options, return_lse, aux)


class Naive(Backend):
    """The formula, with every score in memory."""

    name = "naive"
    implementation = Implementation.NAIVE

    def supports(self, call: Call) -> str | None:
        return None

    def plan(self, call: Call) -> Run:
        options, return_lse = call.options, call.return_lse
        return lambda q, k, v, aux: naive.naive(q, k, v, options, return_lse, aux)


BACKENDS: tuple[Backend, ...] = (KernelBackend("sm90"), KernelBackend("triton"), SDPA(), Tiled(), Compiled(), Naive())
"""In the order in which they are asked."""


@constant_when_traced
def _load(name: str) -> None:
    """Import a backend's module. torch.compile traces no import; it calls this as it is."""
    for backend in BACKENDS:
        if isinstance(backend, KernelBackend) and backend.name == name and backend.loaded is None:
            backend.loaded = importlib.import_module(f"..kernels.{name}.backend", __package__)


plans: dict[Any, Run] = {}
_kernel_plans: dict[Any, KernelPlan] = {}
plan_caches += [plans, _kernel_plans]
MAX_PLANS = 4096
"""Plans kept of a kind; beyond, all are dropped, and made again when they are needed."""

_allowed: tuple[str, ...] | None = None


@contextmanager
def use_backends(*names: str) -> Iterator[None]:
    """Inside, calls are computed by these backends alone, on all threads: for tests and comparisons.

    Raises:
        ValueError: a name is not one of `BACKENDS`.
    """
    global _allowed
    known = [backend.name for backend in BACKENDS]
    for name in names:
        if name not in known:
            raise ValueError(f"names must be of {', '.join(known)}; got {name!r}")
    before, _allowed = _allowed, names
    clear_plans()
    try:
        yield
    finally:
        _allowed = before
        clear_plans()


def remember(key: Hashable, plan: Run) -> None:
    """Keep the plan of calls with this key."""
    if len(plans) >= MAX_PLANS:
        plans.clear()
    plans[key] = plan


def clear_plans() -> None:
    """Forget all plans: what they depend on besides a call's metadata has changed."""
    for cache in plan_caches:
        cache.clear()


def parse(impl: str | Implementation) -> Implementation | None:
    """The implementation that was named; None for "auto"."""
    if isinstance(impl, Implementation):
        return impl  # making a member of another is more than torch.compile of torch 2.11 can trace
    expected = ", ".join(map(repr, NAMES))
    if not isinstance(impl, str):
        raise TypeError(f"impl must be one of {expected}; got {impl!r} of type {type(impl).__name__}")
    if impl not in NAMES:
        raise ValueError(f"impl must be one of {expected}; got {impl!r}")
    return None if impl == "auto" else Implementation(impl)


def choose(call: Call, impl: str | Implementation = "auto") -> Backend:
    """The backend that computes a call.

    Raises:
        ValueError: ``impl`` names an implementation that cannot compute the call.
    """
    implementation = parse(impl)
    reasons = []
    for backend in BACKENDS:
        if implementation is None and not _is_asked(backend, call.device.type):
            continue
        if implementation is not None and backend.implementation is not implementation:
            continue
        reason = _supports(backend, call)
        if reason is None:
            return backend
        reasons.append((backend.name, reason))
    if implementation is None:
        raise ValueError(f"no backend can compute this call: {'; '.join(': '.join(pair) for pair in reasons)}")
    # Kernels for one GPU say that they are for that one; what the last says is what keeps the call from all.
    raise ValueError(f"impl={implementation.value!r} cannot compute this call: {reasons[-1][1]}")


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with a call.

    Attributes:
        choice: the implementation that would run.
        backend: its backend.
        backward: the backend of the backward, None where autograd differentiates the forward or there is none.
        reasons: for each other backend by name, why not it.
    """

    choice: Implementation
    backend: str
    backward: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend}: chosen"]
        if self.backward not in (None, self.backend):
            lines[0] += f", with the backward of {self.backward}"
        return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in self.reasons.items())])


def explain(call: Call, impl: str | Implementation = "auto") -> Explanation:
    """Choose as `choose` does, and say why not each other backend."""
    chosen = choose(call, impl)
    implementation = parse(impl)
    passed = f"impl={chosen.implementation.value!r} was asked for"
    if implementation is None:
        passed = f"{chosen.name!r} comes before it on {call.device.type}"
    reasons = {backend.name: _supports(backend, call) or passed for backend in BACKENDS if backend is not chosen}
    backward = None
    if isinstance(chosen, KernelBackend) and call.aux.cache_lengths is None:
        backend, refused = _choose_backward(call)
        backward = backend.name
        for name, reason in refused.items():
            reasons[f"{name} backward"] = reason
    return Explanation(chosen.implementation, chosen.name, backward, reasons)


def _choose_backward(call: Call) -> tuple[KernelBackend, dict[str, str]]:
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        if isinstance(backend, KernelBackend) and not _is_excluded(backend):
            reason = backend.supports_backward(call)
            if reason is None:
                return backend, refused
            refused[backend.name] = reason
    raise ValueError(f"no backend can differentiate this call: {'; '.join(refused.values())}")


def _is_asked(backend: Backend, device_type: str) -> bool:
    return backend.auto is None or device_type in backend.auto


def _is_excluded(backend: Backend) -> bool:
    return _allowed is not None and backend.name not in _allowed


def _supports(backend: Backend, call: Call) -> str | None:
    if _is_excluded(backend):
        return f"use_backends() leaves {', '.join(_allowed or ())} alone"
    return backend.supports(call)


def _why_not_triton(device: torch.device) -> str | None:
    """What is known without importing Triton."""
    if not TRITON_IS_INSTALLED:
        return "it needs the package triton, which is not installed"
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        return f"it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got {device}"
    return None


def interpreting() -> bool:
    """Whether Triton is asked to interpret kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def _why_not_decode(call: Call) -> str | None:
    return None if call.aux.cache_lengths is None else "it takes no KV cache lengths that the device alone knows"


def differentiable_plan(backend: Backend, call: Call) -> Plan:
    """The plan of a call for the autograd Functions."""
    implementation = backend.implementation.value
    if must_dispatch(call.q, call.k, call.v, *call.aux.tensors):
        return TracedPlan(implementation, call.options)
    return kernel_plan(call) if isinstance(backend, KernelBackend) else tiled.TiledPlan(call.options)


def _differentiable(function: Any, backend: Backend, call: Call) -> Run:
    plan, return_lse = differentiable_plan(backend, call), call.return_lse
    if isinstance(plan, TracedPlan):  # whose operators have gradients
        return lambda q, k, v, aux: plan.forward(q, k, v, aux) if return_lse else (plan.forward(q, k, v, aux)[0], None)

    apply = apply_of(function)

    def run(q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> Result:
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
    """What follows from the metadata of a call for the kernels: its forward, and backwards by what they get."""

    __slots__ = ("_backwards", "_forward", "_guard", "options")

    def __init__(self, call: Call) -> None:
        backends = [backend for backend in BACKENDS if isinstance(backend, KernelBackend)]
        reasons = [_supports(backend, call) for backend in backends]
        if None not in reasons:
            raise ValueError(f"the flash kernels cannot compute this call: {reasons[-1]}")
        self.options = call.options
        self._guard = call.device if call.device.type == "cuda" else None
        self._forward = backends[reasons.index(None)].module.plan_forward(call)
        self._backwards: dict[Any, Callable[..., Gradients]] = {}

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
            run = _choose_backward(call)[0].module.plan_backward(call, out, dout, dlse is not None, wanted)
            self._backwards[key] = run
        return run(q, k, v, out, lse, dout, dlse, aux)


def kernel_plan(call: Call) -> KernelPlan:
    """The plan of a call, made once for its key."""
    key = call.key
    plan = _kernel_plans.get(key)
    if plan is None:
        if len(_kernel_plans) >= MAX_PLANS:
            _kernel_plans.clear()
        plan = _kernel_plans[key] = KernelPlan(call)
    return plan


def _plan_of_operator(implementation: str, call: Call) -> Plan:
    return kernel_plan(call) if implementation == "flash" else tiled.TiledPlan(call.options)


op.register("flash", _plan_of_operator, ("CUDA", "CPU"))
op.register("tiled", _plan_of_operator, ("CompositeExplicitAutograd",))
