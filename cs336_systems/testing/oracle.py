"""What results are compared with: attention in float64, naive in the inputs' own dtype, and the size of its terms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..attention import attention
from ..attention.features import Features as AskedFeatures
from ..attention.pairs import Extras, Pairs, Term, kept_pairs, scores_and_slopes, seen_pairs
from ..attention.spec import AttentionSpec
from ..attention.traced import Traced
from ..attention.validation import check
from ..kernels.rules import tensors_of
from .evaluation import Results, evaluate
from .features import Features, in_dtype
from .inputs import Inputs


def naive_results(
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    return_lse: bool = True,
) -> Results:
    """Values and gradients of the naive implementation in the dtype of the inputs."""
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
    return evaluate(partial(attention, impl="naive", **settings), inputs, features)


def oracle(
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    return_lse: bool = True,
) -> Results:
    """Values and gradients for these inputs, computed in float64."""
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
    return naive_results(inputs.to(torch.float64), features=in_dtype(features or {}, torch.float64), **settings)


def rounding_on(device: torch.device) -> float:
    """How far float32 arithmetic on a device may round each term of a sum: by 2 eps, or 8 eps on a GPU.

    Tensor cores truncate their sums (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), which is a bias,
    where rounding errors cancel. And "flash" multiplies float32 numbers as two parts of 11 bits.
    """
    return (8 if device.type == "cuda" else 2) * torch.finfo(torch.float32).eps


DRAWS = 32
"""Of random signs, for the size of terms that autograd adds up by itself."""


def terms(inputs: Inputs, **settings: Any) -> Results:
    """For each result, the root of the sum of the squares of what is added up to make it, in some shape.

    What is rounded to ``dtype``, that of the inputs unless said otherwise, counts by how much coarser that is than the
    roundings to float32 that the budget allows each term. The other settings are those of `oracle`.
    """
    return _terms_and_roundings(inputs, **settings)[0]


def roundings(inputs: Inputs, **settings: Any) -> Results:
    """For out, dq, dk and dv, the standard deviation that roundings to the inputs' dtype give each element.

    Products round the weights and the gradients of the scores; delta comes from an output that was rounded. Each is off
    by eps / sqrt(12) of itself. The settings are those of `oracle`.
    """
    return _terms_and_roundings(inputs, **settings)[1]


@torch.no_grad()
def _terms_and_roundings(
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    return_lse: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Results, Results]:
    dtype = inputs.q.dtype if dtype is None else dtype
    q, k, v, dout, dlse = inputs.to(torch.float64)
    asked = in_dtype(features or {}, torch.float64)
    window = asked.pop("window", None)
    problem = check(q, k, v, causal, scale, return_lse, window, AskedFeatures(**asked))
    spec, extras = problem.spec, Extras.of(problem.spec, problem.extras)
    if q.ndim == 2:
        q, k, v, dout, dlse = (x[None] for x in (q, k, v, dout, dlse))
    rows, columns = slice(0, problem.q_len), slice(0, problem.k_len)
    pairs = Pairs.of(spec, extras, q, k, rows, columns)
    kv = max(1, k.shape[-3])
    q, dout, dlse = (
        rearrange(x, "... (kv group) row d -> ... kv group row d", kv=kv) for x in (q, dout, dlse.unsqueeze(-1))
    )
    k, v = k.unsqueeze(-3), v.unsqueeze(-3)

    products, product_terms = (q @ k.mT) * spec.scale, _root_sum_square(q, k.mT) * abs(spec.scale)
    captured = _captured(asked)
    wanted = [tensor.requires_grad for tensor in captured.values()]
    scores, slope, of_captured = scores_and_slopes(spec, products, pairs, extras.by_scores, wanted)
    score_terms = _score_terms(spec, products, product_terms, pairs, extras.by_scores)
    seen = seen_pairs(spec, pairs, spec.band(problem.q_len, problem.k_len), extras)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    sinks = scores.new_full((1, 1, 1), -math.inf)
    if extras.sinks is not None:
        sinks = extras.sinks.view(1 if problem.q_heads is None else kv, q.shape[-3], 1, 1)
    lse = torch.logsumexp(torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1), -1, keepdim=True)
    never = lse.masked_fill(lse == -math.inf, math.inf)
    weights = torch.exp(scores - never)
    kept = 1.0 if extras.seed is None else kept_pairs(spec, pairs, extras.seed) * spec.as_settings.kept_scale
    score_terms = score_terms.masked_fill(scores == -math.inf, 0.0)
    sink_terms = _finite(sinks).abs()
    largest = score_terms.amax(-1, keepdim=True) if problem.k_len else 0.0
    # Kernels add up the sums of tiles of 64 keys, one after another.
    counted = ((scores > -math.inf).sum(-1, keepdim=True) / 64).sqrt()
    delta_parts = dout * ((weights * kept) @ v)
    delta_terms = torch.linalg.vector_norm(delta_parts, dim=-1, keepdim=True)
    # The backward computes delta from an output that was rounded.
    one_rounding = torch.finfo(dtype).eps / math.sqrt(12)
    rounded_delta = max(0.0, one_rounding / rounding_on(q.device) - 1.0) * delta_terms
    delta = delta_parts.sum(-1, keepdim=True) - (dlse if return_lse else 0.0)
    products_rounded = torch.hypot(weights * ((dout @ v.mT) * kept - delta), weights * delta_terms)
    products_rounded = products_rounded * abs(spec.scale) * torch.as_tensor(slope).abs()
    if return_lse:
        delta_terms = delta_terms + dlse.abs()
    # Weights inherit the rounding of their scores; in a backward pass that has only the log-sum-exp to start from, its
    # rounding too.
    weights_once = weights * (1.0 + score_terms)
    weights_again = weights_once + weights * _finite(lse).abs()
    score_gradients = weights_again * (_root_sum_square(dout, v.mT) * kept + delta_terms) + weights * rounded_delta
    # A slope is made of terms as large as 1, as that of a cap is, however flat it is.
    product_gradients = score_gradients * abs(spec.scale) * torch.as_tensor(slope).abs().clamp(min=1.0)
    made = {
        "out": _root_sum_square(weights_once * kept, v),
        "lse": (largest + sink_terms + _finite(lse).abs() + 1.0 + counted).squeeze(-1),
        "dq": _root_sum_square(product_gradients, k),
        "dk": _root_sum_square(_over_group(product_gradients).mT, _over_group(q)),
        "dv": _root_sum_square(_over_group(weights_again * kept).mT, _over_group(dout)),
    }
    by_number = _captured_terms(of_captured, score_gradients, extras.by_scores, pairs, rows, columns)
    # Twice, because terms that are added up along a row share the roundings of its delta and its log-sum-exp.
    made |= {name: 2 * by_number[number] for number, name in enumerate(captured) if number in by_number}
    if extras.sinks is not None:
        # Four standard deviations of delta's rounding: naive does not round delta, so its error allows for none.
        of_sinks = torch.exp(sinks - never) * (
            (1.0 + sink_terms + _finite(lse).abs()) * delta_terms + 4 * rounded_delta
        )
        heads = 1 if problem.q_heads is None else problem.q_heads
        by_head = of_sinks.reshape(math.prod(problem.batch), heads, problem.q_len)
        made["dsinks"] = torch.linalg.vector_norm(by_head, dim=(0, 2))
    rounded = {
        "out": _root_sum_square(weights * kept, v),
        "dq": _root_sum_square(products_rounded, k),
        "dk": _root_sum_square(_over_group(products_rounded).mT, _over_group(q)),
        "dv": _root_sum_square(_over_group(weights * kept).mT, _over_group(dout)),
    }
    return made, {name: one_rounding * deviation for name, deviation in rounded.items()}


def _captured_terms(
    terms: Sequence[Term | Traced],
    score_gradients: Tensor,
    captured: Sequence[Tensor],
    pairs: Pairs,
    rows: slice,
    columns: slice,
) -> dict[int, Tensor]:
    """By number, the same for what the scores captured and whose gradient is wanted."""
    made: dict[int, Tensor] = {}
    for term in terms:
        if isinstance(term, Traced):
            made |= _traced_terms(term, score_gradients, captured, pairs, rows, columns)
            continue
        squares = torch.zeros_like(captured[term.number])
        squared = term._replace(term=torch.as_tensor(term.term).square())
        squared.add_to({term.number: squares}, score_gradients.square(), pairs, rows, columns)
        made[term.number] = squares.sqrt()
    return made


def _traced_terms(
    term: Traced, score_gradients: Tensor, captured: Sequence[Tensor], pairs: Pairs, rows: slice, columns: slice
) -> dict[int, Tensor]:
    """An estimate: under random signs of its terms the mean square of a sum is the sum of their squares."""
    generator = torch.Generator(score_gradients.device).manual_seed(0)
    squares = {number: torch.zeros_like(captured[number]) for number in term.numbers}
    for _ in range(DRAWS):
        signs = torch.rand(score_gradients.shape, generator=generator, device=score_gradients.device).sub(0.5).sign()
        totals = {number: torch.zeros_like(captured[number]) for number in term.numbers}
        term.add_to(totals, score_gradients * signs, pairs, rows, columns)
        for number, total in totals.items():
            squares[number] += total.square() / DRAWS
    return {number: square.sqrt() for number, square in squares.items()}


def _captured(features: Features) -> dict[str, Tensor]:
    """The tensors that change scores, by the names of their gradients, in the order of `pairs.Extras`."""
    alone = {f"d{name}": features[name] for name in ("alibi_slopes", "bias") if features.get(name) is not None}
    by_rules = features["scores"].tensors if features.get("scores") is not None else ()
    return alone | {f"dscores_{number}": tensor for number, tensor in enumerate(by_rules)}


def _score_terms(spec: AttentionSpec, scores: Tensor, size: Tensor, pairs: Pairs, captured: Sequence[Tensor]) -> Tensor:
    """The size of what is added up to make each score, from that of q kᵀ: a rule is taken for the line that touches it.

    Its slope multiplies what was there, and what the line crosses the axis at is added to it.
    """
    rest = iter(captured)
    for leaf in spec.scores:
        own = [next(rest) for _ in range(tensors_of(leaf))]
        rule = dataclasses.replace(spec, scores=(leaf,))
        changed, slope, _ = scores_and_slopes(rule, scores, pairs, own, [False] * len(own))
        size = ((slope * size) ** 2 + (changed - slope * scores) ** 2 + changed**2).sqrt()
        scores = changed
    return size


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), 0.0)


def _over_group(x: Tensor) -> Tensor:
    """The rows of all query heads of a group in one matrix, which is what the gradients of its keys sum over."""
    return rearrange(x, "... kv group row column -> ... kv 1 (group row) column")


def _root_sum_square(left: Tensor, right: Tensor) -> Tensor:
    """left @ right with the root of the sum of squares in place of the sum."""
    left_unit, right_unit = unit_of(left), unit_of(right)
    left, right = left / left_unit, right / right_unit
    return ((left * left) @ (right * right)).sqrt() * (left_unit * right_unit)


def unit_of(x: Tensor) -> Tensor:
    """The largest finite magnitude, so that squares of what it divides neither overflow nor vanish; 1 in place of 0."""
    magnitudes = x.abs().nan_to_num(0.0, posinf=0.0)
    largest = magnitudes.amax() if x.numel() else x.new_zeros(())
    return torch.where(largest > 0, largest, 1.0)
