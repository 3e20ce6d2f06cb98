"""What a call would run on, and why not on each other backend."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.call import Call
from .dispatch import BACKENDS, KernelBackend, choose, choose_backward, supports
from .validation import Implementation, parse_implementation


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with a call.

    Attributes:
        choice: the implementation that would run.
        backend: its backend.
        backward: the backend of the backward; None if the backend is not one of kernels, or the call has no backward.
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


def explain_call(call: Call, impl: str | Implementation = "auto") -> Explanation:
    """Choose as `choose` does, and say why not each other backend."""
    chosen = choose(call, impl)
    implementation = parse_implementation(impl)
    reasons = {}
    for backend in BACKENDS:
        if backend is not chosen:
            passed = f"impl={chosen.implementation.value!r} was asked for"
            if implementation is None:
                passed = backend.passed_over(call) or f"{chosen.name!r} comes before it on {call.device.type}"
            reasons[backend.name] = supports(backend, call) or passed
    backward = None
    if isinstance(chosen, KernelBackend) and call.aux.cache_lengths is None:
        backend, refused = choose_backward(call, call.wanted)
        backward = backend.name
        for name, reason in refused.items():
            reasons[f"{name} backward"] = reason
    return Explanation(chosen.implementation, chosen.name, backward, reasons)
