"""Which implementation computes a call: what each can do, and which comes first where several can."""

from __future__ import annotations

import enum
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.rules import registry
from ..kernels.settings import MOST_ROWS, is_known
from .spec import AttentionSpec
from .validation import Problem, check, shape_of


class Implementation(str, enum.Enum):
    """The ways to compute attention."""

    FLASH = "flash"
    SDPA = "sdpa"
    COMPILED = "compiled"
    TILED = "tiled"
    NAIVE = "naive"


Preference = Mapping[str, tuple[Implementation, ...]]
ReasonAgainst = Callable[[Implementation, Problem], "str | None"]

PREFERENCE: Preference = {
    "cuda": (Implementation.FLASH, Implementation.SDPA, Implementation.TILED, Implementation.NAIVE),
    "cpu": (Implementation.SDPA, Implementation.TILED, Implementation.NAIVE),
}
"""The order in which "auto" asks, by device type; other devices are asked as the CPU is."""

# Written out here because torch.compile cannot iterate over an enum.
IMPLEMENTATIONS = tuple(Implementation)
NAMES = ("auto", *(implementation.value for implementation in IMPLEMENTATIONS))

TRITON_IS_INSTALLED = importlib.util.find_spec("triton") is not None

ARGUMENTS = 6
"""Of the autograd Functions, before a call's further tensors."""

MOST_HEAD_DIM = 1024
"""The widest head that the flash kernels take."""

MOST_DROPOUT = 0.9999
"""The largest ``dropout_p`` below 1 that the flash kernels take in float32.

They split score gradients into float16 numbers under one scale. Where a weight is kept its gradient is multiplied by
1 / (1 - dropout_p); above this, those of a row without any kept weight then fall below float16's smallest numbers.
"""


@dataclass(frozen=True)
class Explanation:
    """What `attention` would do with a call.

    Attributes:
        choice: the implementation that would run.
        passed_over: for each other one, why not it.
        kernels: of "flash", which kernels would run, and why not others.
    """

    choice: Implementation
    passed_over: dict[Implementation, str]
    kernels: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.choice.value}: chosen" + (f", with {self.kernels}" if self.kernels else "")]
        return "\n".join(lines + [f"{other.value}: {reason}" for other, reason in self.passed_over.items()])


def parse(impl: str | Implementation) -> Implementation | None:
    """The implementation that was named; None for "auto"."""
    if isinstance(impl, Implementation):
        return impl  # a member made of another is more than torch.compile of torch 2.11 can trace
    expected = ", ".join(map(repr, NAMES))
    if not isinstance(impl, str):
        raise TypeError(f"impl must be one of {expected}; got {impl!r} of type {type(impl).__name__}")
    if impl not in NAMES:
        raise ValueError(f"impl must be one of {expected}; got {impl!r}")
    return None if impl == "auto" else Implementation(impl)


def choose(
    problem: Problem,
    impl: str | Implementation = "auto",
    preference: Preference = PREFERENCE,
    reason_against: ReasonAgainst | None = None,
) -> Implementation:
    """The implementation that computes a call.

    Args:
        problem: the call.
        impl: what was asked for.
        preference: the order of "auto" by device type, "cpu" for those that are not there.
        reason_against: `why_not`, or what takes its place for calls of another kind.

    Raises:
        ValueError: ``impl`` names an implementation that cannot compute the call.
    """
    against = why_not if reason_against is None else reason_against
    asked = parse(impl)
    if asked is not None:
        # The others are not asked: an answer can depend on lengths, and what is traced would hold for such alone.
        reason = against(asked, problem)
        if reason is not None:
            raise ValueError(f"impl={asked.value!r} cannot compute this call: {reason}")
        return asked
    order = preference.get(problem.device.type, preference["cpu"])
    return next(implementation for implementation in order if against(implementation, problem) is None)


def explain(
    problem: Problem,
    impl: str | Implementation = "auto",
    preference: Preference = PREFERENCE,
    reason_against: ReasonAgainst | None = None,
) -> Explanation:
    """Choose as `choose` does, and say why not each other one."""
    choice = choose(problem, impl, preference, reason_against)
    against = why_not if reason_against is None else reason_against
    others = f"{choice.value!r} " + (
        "was asked for" if parse(impl) is not None else f"comes before it on {problem.device.type}"
    )
    passed_over = {
        implementation: against(implementation, problem) or others
        for implementation in IMPLEMENTATIONS
        if implementation is not choice
    }
    return Explanation(choice, passed_over)


def spec_for(
    implementation: Implementation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool | str | AttentionSpec,
    scale: float | None,
    return_lse: bool,
) -> AttentionSpec:
    """The spec of a call made directly on an autograd Function, validated unless it is one already."""
    if isinstance(is_causal, AttentionSpec):
        return is_causal.within(q.shape[-2], k.shape[-2])
    problem = check(q, k, v, is_causal, scale, return_lse)
    if q.ndim < 3:
        raise ValueError(f"q must have at least 3 dimensions (batch, length, head_dim); got {shape_of(q)}")
    choose(problem, implementation)
    return problem.spec


def why_not(implementation: Implementation, problem: Problem) -> str | None:
    """Why an implementation cannot compute a call, or None when it can."""
    if implementation is Implementation.FLASH:
        missing = _without_gradient(problem)
        if missing is not None:
            return f"the score rule {missing} captured a tensor that needs a gradient, and has no `gradient` for it"
        return _why_not_flash(problem)
    if implementation is Implementation.SDPA:
        return _why_not_sdpa(problem)
    return None


def _why_not_flash(problem: Problem) -> str | None:
    if not TRITON_IS_INSTALLED:
        return "it needs the package triton, which is not installed"
    if problem.dtype == torch.float64:
        return "it computes in float16, bfloat16 and float32; got float64"
    if is_known(problem.q_len > MOST_ROWS) or is_known(problem.k_len > MOST_ROWS):
        return f"it counts rows in 32 bits, up to {MOST_ROWS}; got {problem.q_len} of q and {problem.k_len} of k"
    widest = max(problem.head_dim, problem.v_head_dim)
    if widest > MOST_HEAD_DIM:
        return f"its head dimensions go up to {MOST_HEAD_DIM}; got {widest}"
    dropout = problem.spec.dropout
    if dropout is not None and MOST_DROPOUT < dropout < 1 and problem.dtype == torch.float32:
        return f"in float32 its dropout_p goes up to {MOST_DROPOUT}, or is 1; got {dropout}"
    if problem.device.type == "cpu" and interpreting():
        # It multiplies the bit patterns of bfloat16 numbers as if they were integers.
        return "Triton's interpreter computes wrong bfloat16 products" if problem.dtype == torch.bfloat16 else None
    if problem.device.type != "cuda":
        return f"it needs tensors on a CUDA GPU (or TRITON_INTERPRET=1 to run on a CPU, slowly); got {problem.device}"
    if interpreting():
        return "TRITON_INTERPRET is set, so its kernels run on CPU tensors alone; got cuda"
    major, minor = torch.cuda.get_device_capability(problem.device)
    if major < 8:
        return f"it needs a GPU of compute capability 8.0 or newer; {problem.device} has {major}.{minor}"
    return None


def _without_gradient(problem: Problem) -> str | None:
    """A rule for scores that cannot say how scores depend on a tensor that needs a gradient."""
    if not problem.extras or not torch.is_grad_enabled():
        return None
    captured = [(leaf[0], slot) for leaf in problem.spec.scores for slot, item in enumerate(leaf[1]) if item is None]
    for (name, slot), tensor in zip(reversed(captured), reversed(problem.extras), strict=False):
        if tensor.requires_grad and slot not in registry[name].gradients:
            return name
    return None


def _why_not_sdpa(problem: Problem) -> str | None:
    if not problem.spec.is_plain:
        return "torch's kernels are asked for causal masks alone"
    if problem.spec.deterministic and problem.device.type == "cuda":
        return "not all of torch's kernels are deterministic"
    if problem.return_lse:
        return "torch's scaled_dot_product_attention does not return the log-sum-exp"
    if problem.is_empty:
        return "torch's kernels disagree on empty inputs"
    if problem.spec.hides_rows(problem.q_len, problem.k_len):
        return "torch's kernels disagree on queries that see no key"
    return None


def interpreting() -> bool:
    """Whether Triton is asked to interpret kernels on the CPU instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
