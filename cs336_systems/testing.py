"""What an implementation of attention is held to: inputs of any layout, a float64 oracle, and an error budget.

The budget compares with `attention(..., impl="naive")` in the same dtype, both measured against the oracle, which is
naive in float64. With ``m`` either the Euclidean norm or the largest magnitude, and for each of out, lse, dq, dk, dv::

    m(x - oracle) <= 2 m(naive - oracle)      twice the error of the straightforward computation
                     + eps m(oracle)          the result is rounded to its dtype, whose eps this is
                     + rounding m(terms)      so is what is multiplied, and sums are rounded, in float32 or float64
                     + smallest m(1)          nothing is resolved below the smallest subnormal number

where rounding is eps / 2, but at least 4 eps of float32, and 16 eps in float64, in which the oracle is no more exact.
``terms`` is, element for element, the root of the sum of the squares of what is added up to make it. It matters where
naive happens to be exact, and where terms cancel: with a single key the gradients of q and k are 0, and computed as the
difference of two roundings of the same number. A NaN is within no budget, and an infinity only where the oracle's is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from .attention import attention
from .attention.spec import Causal
from .attention.validation import check

Shape = tuple[int, ...]
Draw = Callable[[Shape], Tensor]
"""Fills a new contiguous tensor of some shape."""
Place = Callable[[Shape, Draw], Tensor]
"""Makes one tensor of a shape, in some arrangement in memory."""
Attend = Callable[[Tensor, Tensor, Tensor], "Tensor | tuple[Tensor, Tensor]"]
"""Attention of q, k, v, its settings already bound: out, or (out, lse)."""
Results = dict[str, Tensor]
"""By name: out, lse if there is one, dq, dk, dv."""


class Shapes(NamedTuple):
    """The shapes of q, k and v."""

    q: Shape
    k: Shape
    v: Shape

    @classmethod
    def of(
        cls,
        *leading: int,
        q_len: int,
        k_len: int | None = None,
        d: int,
        dv: int | None = None,
        q_heads: int | None = None,
        kv_heads: int | None = None,
    ) -> Shapes:
        """(*leading, [heads,] length, width); keys are as queries, and values as keys, unless said otherwise."""
        q_axes = () if q_heads is None else (q_heads,)
        kv_axes = q_axes if kv_heads is None else (kv_heads,)
        k_len = q_len if k_len is None else k_len
        k_leading = (*leading, *kv_axes, k_len)
        return cls((*leading, *q_axes, q_len, d), (*k_leading, d), (*k_leading, d if dv is None else dv))


class Inputs(NamedTuple):
    """The tensors of a call, and gradients of what it returns."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same values in another dtype; the gradient of the log-sum-exp in the one that it then has."""
        q, k, v, dout, dlse = self
        wide = torch.promote_types(dtype, torch.float32)
        return Inputs(q.to(dtype), k.to(dtype), v.to(dtype), dout.to(dtype), dlse.to(wide))


def contiguous(shape: Shape, draw: Draw) -> Tensor:
    """Row-major."""
    return draw(shape)


def length_before_heads(shape: Shape, draw: Draw) -> Tensor:
    """(..., length, heads, width) in memory, as a projection leaves it; (length, batch, width) without heads."""
    return draw((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-3, -2)


def padded_rows(shape: Shape, draw: Draw) -> Tensor:
    """Rows further apart than they are wide, by an odd number of elements."""
    return draw((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]


def spaced_columns(shape: Shape, draw: Draw) -> Tensor:
    """Every second element, so the last stride is 2."""
    return draw((*shape[:-1], 2 * shape[-1]))[..., ::2]


def column_major(shape: Shape, draw: Draw) -> Tensor:
    """Rows contiguous across, so the last stride is the length."""
    return draw((*shape[:-2], shape[-1], shape[-2])).mT


def misaligned(shape: Shape, draw: Draw) -> Tensor:
    """Contiguous, from an address that is no multiple of 16 bytes."""
    return draw((math.prod(shape) + 1,))[1:].view(shape)


def shared_by_heads(shape: Shape, draw: Draw) -> Tensor:
    """One matrix for all heads, or for the whole batch where there are none: stride 0."""
    return draw((*shape[:-3], 1, *shape[-2:])).expand(shape)


def shared_by_batch(shape: Shape, draw: Draw) -> Tensor:
    """One entry for the whole batch: stride 0."""
    return draw((1, *shape[1:])).expand(shape)


def shared_by_rows(shape: Shape, draw: Draw) -> Tensor:
    """One row for the whole length: stride 0."""
    return draw((*shape[:-2], 1, shape[-1])).expand(shape)


PLACES: dict[str, tuple[Place, Place]] = {
    "contiguous": (contiguous, contiguous),
    "length_before_heads": (length_before_heads, length_before_heads),
    "padded_rows": (padded_rows, padded_rows),
    "spaced_columns": (spaced_columns, spaced_columns),
    "column_major": (column_major, column_major),
    "misaligned": (misaligned, misaligned),
    "kv_shared_by_heads": (contiguous, shared_by_heads),
    "kv_shared_by_batch": (contiguous, shared_by_batch),
    "q_shared_by_rows": (shared_by_rows, contiguous),
    "mixed": (column_major, length_before_heads),
}
"""Arrangements that each tensor can have by itself: of q, and of k and v."""

LAYOUTS = (*PLACES, "packed")
"""The names that `make_inputs` takes; "packed" is one projection (..., length, all heads of q, k and v) in slices."""


def packed(shapes: Shapes, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as slices of one tensor. Their lengths must agree."""
    q, k, _ = shapes
    if q[-2] != k[-2]:
        raise ValueError(f"k must have the length of q, {q[-2]}, to be packed with it; got {k[-2]}")
    has_heads = len(q) >= 4
    leading = q[:-3] if has_heads else q[:-2]
    widths = [shape[-3] * shape[-1] if has_heads else shape[-1] for shape in shapes]
    slices = draw((*leading, q[-2], sum(widths))).split(widths, dim=-1)
    if not has_heads:
        return slices
    heads = [part.unflatten(-1, (shape[-3], shape[-1])) for part, shape in zip(slices, shapes, strict=True)]
    return heads[0].transpose(-3, -2), heads[1].transpose(-3, -2), heads[2].transpose(-3, -2)


def make_inputs(
    shapes: Shapes,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: str = "contiguous",
    generator: torch.Generator | None = None,
) -> Inputs:
    """Standard normal tensors of these shapes, q, k and v in one of `LAYOUTS`, gradients contiguous."""

    def draw(shape: Shape) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if layout == "packed":
        q, k, v = packed(shapes, draw)
    else:
        q_place, kv_place = PLACES[layout]
        q, k, v = q_place(shapes.q, draw), kv_place(shapes.k, draw), kv_place(shapes.v, draw)
    dout = draw((*shapes.q[:-1], shapes.v[-1]))
    dlse = torch.randn(
        shapes.q[:-1], dtype=torch.promote_types(dtype, torch.float32), device=device, generator=generator
    )
    return Inputs(q, k, v, dout, dlse)


def evaluate(attend: Attend, inputs: Inputs) -> Results:
    """What ``attend`` returns for these inputs, and the gradients of q, k and v, as the very tensors given."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    returned = attend(*leaves)
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    gradients = torch.autograd.grad(outputs, leaves, (inputs.dout, inputs.dlse)[: len(outputs)])
    named = zip(("out", "lse", "dq", "dk", "dv"), (*outputs, *[None] * (2 - len(outputs)), *gradients), strict=True)
    return {name: x.detach() for name, x in named if x is not None}


def naive_results(
    inputs: Inputs, *, causal: bool | str = False, scale: float | None = None, return_lse: bool = True
) -> Results:
    """Values and gradients of the naive implementation in the dtype of the inputs."""
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
    return evaluate(partial(attention, impl="naive", **settings), inputs)


def oracle(
    inputs: Inputs, *, causal: bool | str = False, scale: float | None = None, return_lse: bool = True
) -> Results:
    """Values and gradients for these inputs, computed in float64."""
    return naive_results(inputs.to(torch.float64), causal=causal, scale=scale, return_lse=return_lse)


@torch.no_grad()
def terms(
    inputs: Inputs, *, causal: bool | str = False, scale: float | None = None, return_lse: bool = True
) -> Results:
    """For each result, the root of the sum of the squares of what is added up to make it, in some shape."""
    problem = check(*inputs[:3], causal, scale, return_lse)
    spec, q_len, k_len = problem.spec, problem.q_len, problem.k_len
    q, k, v, dout, dlse = inputs.to(torch.float64)
    if problem.q_heads is None:
        q, k, v, dout, dlse = (x.unsqueeze(-3) for x in (q, k, v, dout, dlse.unsqueeze(-1)))
    else:
        dlse = dlse.unsqueeze(-1)
    kv = max(1, k.shape[-3])
    q, dout, dlse = (rearrange(x, "... (kv group) row d -> ... kv group row d", kv=kv) for x in (q, dout, dlse))
    k, v = k.unsqueeze(-3), v.unsqueeze(-3)

    scores = (q @ k.mT) * spec.scale
    if spec.causal is not Causal.NONE:
        seen = spec.visible(slice(0, q_len), slice(0, k_len), spec.diagonal(q_len, k_len), q.device)
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf))
    score_terms = _root_sum_square(q, k.mT) * abs(spec.scale)
    largest = score_terms.masked_fill(scores == -math.inf, 0.0).amax(-1) if k_len else 0.0
    delta_terms = torch.linalg.vector_norm(dout * (weights @ v), dim=-1, keepdim=True)
    if return_lse:
        delta_terms = delta_terms + dlse.abs()
    # A backward pass that has only the log-sum-exp to start from inherits its rounding, to float32, in every weight.
    rounded = lse.masked_fill(lse.isinf(), 0.0).abs() if inputs.q.dtype.itemsize > 2 else 0.0
    weights_again = weights * (1.0 + rounded)
    score_gradients = weights_again * (_root_sum_square(dout, v.mT) + delta_terms) * abs(spec.scale)
    return {
        "out": _root_sum_square(weights, v),
        "lse": largest + lse.squeeze(-1).masked_fill(lse.squeeze(-1).isinf(), 0.0).abs() + 1.0,
        "dq": _root_sum_square(score_gradients, k),
        "dk": _root_sum_square(_over_group(score_gradients).mT, _over_group(q)),
        "dv": _root_sum_square(_over_group(weights_again).mT, _over_group(dout)),
    }


def _over_group(x: Tensor) -> Tensor:
    """The rows of all query heads of a group in one matrix, which is what the gradients of its keys sum over."""
    return rearrange(x, "... kv group row column -> ... kv 1 (group row) column")


def _root_sum_square(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with the root of the sum of squares in place of the sum."""
    left_unit, right_unit = _unit(left), _unit(right)
    left, right = left / left_unit, right / right_unit
    return ((left * left) @ (right * right)).sqrt() * (left_unit * right_unit)


def _unit(x: Tensor) -> Tensor:
    """The largest magnitude: squares of what is divided by it neither overflow nor vanish. 1 if there is none but 0."""
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    return torch.where(largest > 0, largest, 1.0)


@dataclass(frozen=True)
class Finding:
    """How far one result is from the oracle, and how far it may be.

    Attributes:
        name: of the result: out, lse, dq, dk or dv.
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
        rounding = 16 * info.eps if x.dtype == torch.float64 else max(own_eps / 2, 4 * torch.finfo(torch.float32).eps)
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
            budget = 2 * naive_error + own_eps * size + rounding * of_terms + smallest * of_ones
            findings.append(Finding(name, measure, error, naive_error, size, budget))
    return findings


def assert_within_budget(
    actual: Results,
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    eps: float | None = None,
) -> None:
    """Hold what an implementation made of ``inputs`` to the budget.

    Raises:
        AssertionError: it is beyond it; the message lists every result.
    """
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": "lse" in actual}
    exact, naive, summed = (make(inputs, **settings) for make in (oracle, naive_results, terms))
    findings = compare(actual, exact, naive, summed, eps=eps)
    if not all(finding.holds for finding in findings):
        raise AssertionError("\n".join(["the error is beyond the budget", *map(str, findings)]))


def difference(x: Tensor, exact: Tensor) -> Tensor:
    """x - exact in float64: 0 where both are the same infinity, NaN where only one is finite."""
    x = x.to(torch.float64)
    return torch.where(x == exact, 0.0, x - exact)


def _measure(x: Tensor) -> tuple[float, float]:
    """The Euclidean norm and the largest magnitude; 0 for empty tensors."""
    if x.numel() == 0:
        return 0.0, 0.0
    unit = _unit(x)
    return float(torch.linalg.vector_norm(x / unit) * unit), float(x.abs().amax())


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
