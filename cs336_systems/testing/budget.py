"""How far an implementation may be from the oracle.

The budget compares with `attention(..., impl="naive")` in the same dtype, both measured against the oracle, which is
naive in float64. With ``m`` either the Euclidean norm or the largest magnitude, and for out, lse and each gradient::

    m(x - oracle) <= 2 m(naive - oracle)      twice the error of the straightforward computation
                     + eps m(oracle)          the result is rounded to its dtype, whose eps this is
                     + rounding m(terms)      so is what is multiplied, and sums are rounded, in float32 or float64
                     + smallest m(1)          nothing is resolved below the smallest subnormal number of its dtype,
                                              nor below float32's smallest normal one, unless that is float64

where rounding is eps / 2, but at least 4 eps of float32, and 16 eps in float64, in which the oracle is no more exact. A
gradient in a finer dtype than out's, as a float32 bias of float16 inputs has it, is made of numbers rounded to out's.
``terms`` is, element for element, the root of the sum of the squares of what is added up to make it. It matters where
naive happens to be exact, and where terms cancel: with a single key the gradients of q and k are 0, and computed as the
difference of two roundings of the same number. A score's terms count among its weight's, whose exponent it is. GPUs
compute in float32, and take its subnormal numbers for 0. A NaN is within no budget, and an infinity only where the
oracle's is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .evaluation import Results
from .features import Features
from .inputs import Inputs
from .oracle import naive_results, oracle, terms, unit_of


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
    actual: Results, exact: Results, naive: Results, summed: Results | None = None, *, eps: float | None = None
) -> list[Finding]:
    """Each result against its budget, in both measures.

    Args:
        actual: what is judged.
        exact, naive, summed: what `oracle`, `naive_results` and `terms` return for the same call. Without ``summed``
            that part of the budget is 0.
        eps: what to take for float32's, such as `TF32_EPS`.

    Raises:
        ValueError: a result is missing, or has another shape or dtype than naive's.
    """
    if set(actual) != set(naive):
        raise ValueError(f"actual must have the results {sorted(naive)}; got {sorted(actual)}")
    findings = []
    for name, x in actual.items():
        if (x.shape, x.dtype) != (naive[name].shape, naive[name].dtype):
            raise ValueError(
                f"{name} must be {naive[name].dtype} {tuple(naive[name].shape)}; got {x.dtype} {tuple(x.shape)}"
            )
        info = torch.finfo(x.dtype)
        own_eps = info.eps if eps is None or x.dtype != torch.float32 else eps
        rounded_to = x.dtype if name in ("out", "lse") else _coarser(x.dtype, actual["out"].dtype)
        rounding = _rounding(rounded_to, eps)
        sizes = zip(
            _measure(difference(x, exact[name])),
            _measure(difference(naive[name], exact[name])),
            _measure(exact[name].masked_fill(exact[name].isinf(), 0.0)),
            _measure(torch.zeros(()) if summed is None else summed[name]),
            _measure(torch.ones_like(exact[name])),
            strict=True,
        )
        for measure, (error, naive_error, size, of_terms, of_ones) in zip(("norm", "largest"), sizes, strict=True):
            smallest = info.smallest_normal * info.eps
            if x.dtype != torch.float64:
                smallest = max(smallest, torch.finfo(torch.float32).smallest_normal)
            budget = 2 * naive_error + own_eps * size + rounding * of_terms + smallest * of_ones
            findings.append(Finding(name, measure, error, naive_error, size, budget))
    return findings


def assert_within_budget(
    actual: Results,
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    eps: float | None = None,
) -> None:
    """Hold what an implementation made of ``inputs``, and ``features``, to the budget.

    Raises:
        AssertionError: it is beyond it; the message lists every result.
    """
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "features": features, "return_lse": "lse" in actual}
    exact, naive, summed = (make(inputs, **settings) for make in (oracle, naive_results, terms))
    findings = compare(actual, exact, naive, summed, eps=eps)
    if not all(finding.holds for finding in findings):
        raise AssertionError("\n".join(["the error is beyond the budget", *map(str, findings)]))


def difference(x: Tensor, exact: Tensor) -> Tensor:
    """x - exact in float64: 0 where both are the same infinity, NaN where only one is finite."""
    x = x.to(torch.float64)
    return torch.where(x == exact, 0.0, x - exact)


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps)


def _rounding(dtype: torch.dtype, eps: float | None) -> float:
    """How large the rounding of a term is; ``eps`` stands for float32's."""
    info = torch.finfo(dtype)
    if dtype == torch.float64:
        return 16 * info.eps
    return max((info.eps if eps is None or dtype != torch.float32 else eps) / 2, 4 * torch.finfo(torch.float32).eps)


def _measure(x: Tensor) -> tuple[float, float]:
    """The Euclidean norm and the largest magnitude; 0 for empty tensors."""
    if x.numel() == 0:
        return 0.0, 0.0
    unit = unit_of(x)
    return float(torch.linalg.vector_norm(x / unit) * unit), float(x.abs().amax())
