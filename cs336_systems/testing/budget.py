"""How far an implementation may be from the oracle: one rule for out, lse and every gradient.

The budget compares with `attention(..., impl="naive")` in the same dtype, both measured against the oracle, which is
naive in float64. It is FlashAttention's rule. With ``m`` either the Euclidean norm or the largest magnitude::

    m(x - oracle) <= 2 m(naive - oracle)      twice the error of the straightforward computation
                     + rounding(oracle)       the result is rounded once to its dtype, whose eps this is: by eps / 2 of
                                              the largest element, and of a norm by eps / sqrt(12), that of a sum of
                                              independent roundings
                     + 2 eps32 m(terms)       sums are rounded in float32, whose eps this is; on a GPU 8 eps32, see
                                              `evaluation.rounding_on`
                     + smallest m(1)          nothing is resolved below the smallest subnormal number of its dtype,
                                              nor below float32's smallest normal one, unless that is float64

Naive's error is one sample of its rounding errors, which in a result of few elements can be small by chance. With
16-bit inputs it therefore counts as at least m(σ) + max(σ), where σ is the standard deviation of each element's
rounding error (`terms.roundings`).

``terms`` is, element for element, the root of the sum of the squares of what is added up to make it. It matters where
naive happens to be exact, and where terms cancel: with a single key the gradients of q and k are 0, and computed as the
difference of two roundings of the same number. A score's terms count among its weight's, whose exponent it is. For
float64 results 16 eps stand for 2 eps32, because the oracle is no more exact. GPUs compute in float32, and take its
subnormal numbers for 0. A NaN is within no budget, and an infinity only where the oracle's is.

Two things differ where q, k and v have 16 bits. Naive's scores have 16 bits too, so its log-sum-exp says nothing of
what a float32 one may be off: its error counts as 2 eps32 m(terms) instead. And the backward starts from an output that
was rounded to 16 bits, from which delta is computed, where naive has the probabilities: that rounding is among `terms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .evaluation import Asked, Results, naive_results, oracle, rounding_on
from .inputs import Inputs
from .terms import roundings, terms, unit_of


class Budget(NamedTuple):
    """What the budget of a call follows from: what `oracle`, `naive_results`, `terms` and `roundings` return."""

    exact: Results
    naive: Results
    summed: Results | None = None
    rounded: Results | None = None


def budget_of(inputs: Inputs, **asked: Unpack[Asked]) -> Budget:
    """The budget of a call."""
    return Budget(*(make(inputs, **asked) for make in (oracle, naive_results, terms, roundings)))


@dataclass(frozen=True)
class Finding:
    """How far one result is from the oracle, and how far it may be.

    Attributes:
        name: of the result: out, lse, dq, dk, dv, or the gradient of a feature.
        measure: "norm" or "largest", for the Euclidean norm or the largest magnitude of the difference.
        error, naive_error: of the implementation, and of naive in the same dtype.
        size: of the oracle's result, in the same measure.
        budget: what ``error`` may be.
    """

    name: str
    measure: str
    error: float
    naive_error: float
    size: float
    budget: float

    @property
    def holds(self) -> bool:
        """Whether the error is within the budget; NaN is not."""
        return self.error <= self.budget

    def __str__(self) -> str:
        return (
            f"{self.name:4} {self.measure:7} error {self.error:.3g}, budget {self.budget:.3g} "
            f"(naive {self.naive_error:.3g}, oracle's size {self.size:.3g}){'' if self.holds else '  <-- beyond'}"
        )


TF32_EPS = 2.0**-10
"""The eps of TF32, to which float32 operands may be rounded if torch's precision setting is not "highest"."""


def compare(
    actual: Results,
    exact: Results,
    naive: Results,
    summed: Results | None = None,
    rounded: Results | None = None,
    *,
    eps: float | None = None,
) -> list[Finding]:
    """Each result against its budget, in both measures.

    Args:
        actual: results to check.
        exact, naive, summed, rounded: see `Budget`. Without one of the last two that summand of the budget is 0.
        eps: what to take for float32's, such as `TF32_EPS`.

    Raises ValueError if a result is missing, or has another shape or dtype than naive's.
    """
    if set(actual) != set(naive):
        raise ValueError(f"actual must have the results {sorted(naive)}; got {sorted(actual)}")
    findings = []
    dtypes = {x.dtype for x in actual.values()}
    for name, x in actual.items():
        if (x.shape, x.dtype) != (naive[name].shape, naive[name].dtype):
            like = f"{naive[name].dtype} {tuple(naive[name].shape)}"
            raise ValueError(f"{name} must be {like}; got {x.dtype} {tuple(x.shape)}")
        # A float64 gradient among float32 results was computed in float32.
        dtype = torch.float32 if x.dtype == torch.float64 and dtypes != {torch.float64} else x.dtype
        info = torch.finfo(dtype)
        own_eps, rounding = info.eps, rounding_on(x.device) if dtype != torch.float64 else 16 * info.eps
        if eps is not None and dtype == torch.float32:
            own_eps, rounding = eps, max(rounding, eps / 2)
        smallest = info.smallest_normal * info.eps
        if dtype != torch.float64:
            smallest = max(smallest, torch.finfo(torch.float32).smallest_normal)
        finite = exact[name].masked_fill(exact[name].isinf(), 0.0)
        by_terms = name == "lse" and any(dtype.itemsize == 2 for dtype in dtypes)
        (size, largest), deviation = _measure(finite), _measure((rounded or {}).get(name, torch.zeros(())))
        for number, measure in enumerate(("norm", "largest")):
            error, naive_error, of_terms, of_ones = (
                _measure(of)[number]
                for of in (
                    difference(x, exact[name]),
                    difference(naive[name], exact[name]),
                    torch.zeros(()) if summed is None else summed[name],
                    torch.ones_like(exact[name]),
                )
            )
            expected = rounding * of_terms if by_terms else 2 * max(naive_error, deviation[number] + deviation[1])
            at_the_end = own_eps * (size / math.sqrt(12) + largest / 2 if number == 0 else largest / 2)
            allowed = expected + at_the_end + rounding * of_terms + smallest * of_ones
            findings.append(Finding(name, measure, error, naive_error, (size, largest)[number], allowed))
    return findings


def assert_within_budget(actual: Results, inputs: Inputs, *, eps: float | None = None, **asked: Unpack[Asked]) -> None:
    """Hold results of a call, or some of them, to its budget.

    Raises AssertionError if it is beyond it; the message lists every result.
    """
    asked["return_lse"] = "lse" in actual
    hold(actual, budget_of(inputs, **asked), "the error is beyond the budget", eps=eps)


def hold(actual: Results, held_to: Budget, message: str, *, eps: float | None = None) -> None:
    """Raise AssertionError, with this message and every finding, if results are beyond their budget."""
    naive = {name: held_to.naive[name] for name in actual}
    findings: Sequence[Finding] = compare(actual, *held_to._replace(naive=naive), eps=eps)
    if not all(finding.holds for finding in findings):
        raise AssertionError("\n".join([message, *map(str, findings)]))


def difference(x: Tensor, exact: Tensor) -> Tensor:
    """x - exact in float64: 0 where both are the same infinity, NaN where only one is finite."""
    x = x.to(torch.float64)
    return torch.where(x == exact, 0.0, x - exact)


def _measure(x: Tensor) -> tuple[float, float]:
    """The Euclidean norm and the largest magnitude; 0 for empty tensors."""
    if x.numel() == 0:
        return 0.0, 0.0
    unit = unit_of(x)
    return float(torch.linalg.vector_norm(x / unit) * unit), float(x.abs().amax())
