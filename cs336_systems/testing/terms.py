"""How large what is added up to make each result is, and how far rounding to 16 bits moves it: parts of the budget."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from typing_extensions import Unpack

from ..attention.call import Arguments, make_call
from ..attention.pairs import Pairs, Term, kept_pairs, scores_and_slopes, seen_pairs
from ..kernels.call import Call, Options
from ..kernels.rules import tensors_of
from .evaluation import Asked, Features, Results, in_dtype, rounding_on
from .inputs import Inputs

SIGNS = 32
"""How many draws of signs estimate a standard deviation, with an error of an eighth."""


@torch.no_grad()
def terms(inputs: Inputs, **asked: Unpack[Asked]) -> Results:
    """For each result, the root of the sum of the squares of what is added up to make it, in some shape.

    What is rounded to the inputs' dtype counts by how much coarser that is than the roundings to float32 that the
    budget allows each term.
    """
    call = _Call.of(inputs, **asked)
    lse, weights, dlse = _finite(call.lse).abs(), call.weights, call.dlse
    sink_terms = _finite(call.sinks).abs()
    largest = call.score_terms.amax(-1, keepdim=True) if call.record.k_len else 0.0
    # Kernels add up the sums of tiles of 64 keys, one after another.
    counted = ((call.scores > -math.inf).sum(-1, keepdim=True) / 64).sqrt()
    # The backward computes delta from an output that was rounded.
    rounded_delta = max(0.0, one_rounding(inputs) / rounding_on(weights.device) - 1.0) * call.delta_terms
    delta_terms = call.delta_terms + dlse.abs()
    # Weights inherit the rounding of their scores; in a backward pass that has only the log-sum-exp to start from, its
    # rounding too.
    weights_once = weights * (1.0 + call.score_terms)
    weights_again = weights_once + weights * lse
    of_values = _root_sum_square(call.dout, call.v.mT) * call.kept
    of_captured = weights_again * (of_values + delta_terms)
    score_gradients = of_captured + weights * rounded_delta
    # A slope is made of terms as large as 1, as that of a cap is, however flat it is.
    product_gradients = score_gradients * abs(call.record.options.scale) * call.slope.abs().clamp(min=1.0)
    made = call.sums(weights_once, product_gradients, weights_again)
    made["lse"] = (largest + sink_terms + lse + 1.0 + counted).squeeze(-1)
    made |= _captured_terms(call, of_captured)
    if call.record.aux.sinks is not None:
        # Four standard deviations of delta's rounding: naive does not round delta, so its error allows for none.
        of_sinks = torch.exp(call.sinks - call.lse_or_inf) * (
            (1.0 + sink_terms + lse) * delta_terms + 4 * rounded_delta
        )
        heads = call.record.aux.sinks.numel()
        entries = math.prod(call.record.q.shape[:-2]) // max(1, heads)
        by_head = of_sinks.reshape(entries, heads, call.record.q_len)
        made["dsinks"] = torch.linalg.vector_norm(by_head, dim=(0, 2))
    return made


@torch.no_grad()
def roundings(inputs: Inputs, **asked: Unpack[Asked]) -> Results:
    """The standard deviation that rounding to 16 bits gives each element of most results; {} for wider inputs.

    They are out, dq, dk, dv, and the gradients of what the scores captured. The matrix products round P and dS to the
    inputs' dtype, and delta is computed from an output rounded to it.
    """
    if inputs.q.dtype.itemsize != 2:
        return {}
    call = _Call.of(inputs, **asked)
    weights, delta = call.weights, call.delta_parts.sum(-1, keepdim=True) - call.dlse
    score_gradients = weights * ((call.dout @ call.v.mT) * call.kept - delta)
    hypotenuse = torch.hypot(score_gradients, weights * call.delta_terms)
    product_gradients = hypotenuse * call.record.options.scale * call.slope
    made = call.sums(weights, product_gradients, weights)
    made |= _captured_roundings(call, score_gradients, weights * call.delta_terms)
    return {name: one_rounding(inputs) * size for name, size in made.items()}


def one_rounding(inputs: Inputs) -> float:
    """The largest standard deviation of the relative error of one rounding to the inputs' dtype."""
    return torch.finfo(inputs.q.dtype).eps / math.sqrt(12)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call in float64: its inputs, and the scores, weights and other values between them and its results.

    Scores and weights have the axes (..., kv_heads, group, row, column), and so have the inputs but for the last one.
    ``slope`` is the derivative of the scores by scale q kᵀ, ``kept`` what dropout multiplies each weight by.
    """

    record: Call
    pairs: Pairs
    by_scores: tuple[Tensor, ...]
    captured: dict[str, Tensor]
    of_captured: list[Term]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    scores: Tensor
    slope: Tensor
    score_terms: Tensor
    sinks: Tensor
    lse: Tensor
    kept: Tensor | float

    @classmethod
    def of(cls, inputs: Inputs, **asked: Unpack[Asked]) -> _Call:
        """Compute it."""
        q, k, v, dout, dlse = inputs.to(torch.float64)
        features = in_dtype(asked.get("features") or {}, torch.float64)
        settings: dict[str, Any] = {"return_lse": True, **{name: x for name, x in asked.items() if name != "features"}}
        record = make_call(q, k, v, Arguments(**settings, **features))
        options, aux = record.options, record.aux
        if q.ndim == 2:
            q, k, v, dout, dlse = (x[None] for x in (q, k, v, dout, dlse))
        pairs = Pairs.of(options, aux, q, k, slice(0, record.q_len), slice(0, record.k_len))
        kv = max(1, k.shape[-3])
        q, dout, dlse = (
            rearrange(x, "... (kv group) row d -> ... kv group row d", kv=kv) for x in (q, dout, dlse.unsqueeze(-1))
        )
        k, v = k.unsqueeze(-3), v.unsqueeze(-3)
        products, product_terms = (q @ k.mT) * options.scale, _root_sum_square(q, k.mT) * abs(options.scale)
        captured = _captured(features)
        wanted = [tensor.requires_grad for tensor in captured.values()]
        scores, slope, of_captured = scores_and_slopes(options, products, pairs, aux.score_aux, wanted)
        score_terms = _score_terms(options, products, product_terms, pairs, aux.score_aux)
        seen = seen_pairs(options, pairs, record.band, aux.mask_aux)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        sinks = scores.new_full((1, 1, 1), -math.inf)
        if aux.sinks is not None:
            sinks = aux.sinks.view(1 if record.q.ndim < 4 else kv, q.shape[-3], 1, 1)
        lse = torch.logsumexp(torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1), -1, keepdim=True)
        kept = 1.0 if aux.seed is None else kept_pairs(options, pairs, aux.seed) * options.keep_scale
        slope, dlse = torch.as_tensor(slope), dlse if settings["return_lse"] else torch.zeros_like(dlse)
        score_terms = score_terms.masked_fill(scores == -math.inf, 0.0)
        made = (captured, of_captured, q, k, v, dout, dlse, scores, slope, score_terms, sinks, lse, kept)
        return cls(record, pairs, aux.score_aux, *made)

    @property
    def lse_or_inf(self) -> Tensor:
        """The log-sum-exp, inf where a row sees nothing: its weights are exp(scores - inf) = 0."""
        return self.lse.masked_fill(self.lse == -math.inf, math.inf)

    @functools.cached_property
    def weights(self) -> Tensor:
        """What softmax makes of the scores."""
        return torch.exp(self.scores - self.lse_or_inf)

    @functools.cached_property
    def delta_parts(self) -> Tensor:
        """The products that delta = dout · out adds up."""
        return self.dout * ((self.weights * self.kept) @ self.v)

    @property
    def delta_terms(self) -> Tensor:
        """The root of the sum of their squares."""
        return torch.linalg.vector_norm(self.delta_parts, dim=-1, keepdim=True)

    def captured_sums(self, of_term: Callable[[Tensor | float], Tensor | float], pairs: Tensor) -> Results:
        """The sums over pairs that make the gradients of captured tensors, of ``of_term(term)`` times ``pairs``."""
        rows, columns = slice(0, self.record.q_len), slice(0, self.record.k_len)
        names, made = list(self.captured), {}
        for term in self.of_captured:
            made[names[term.number]] = total = torch.zeros_like(self.by_scores[term.number])
            changed = term._replace(term=of_term(term.term))
            changed.add_to({term.number: total}, pairs, self.pairs, rows, columns)
        return made

    def sums(self, weights: Tensor, product_gradients: Tensor, weights_of_dv: Tensor) -> Results:
        """The root of the sum of the squares of what makes out, dq, dk and dv."""
        return {
            "out": _root_sum_square(weights * self.kept, self.v),
            "dq": _root_sum_square(product_gradients, self.k),
            "dk": _root_sum_square(_over_group(product_gradients).mT, _over_group(self.q)),
            "dv": _root_sum_square(_over_group(weights_of_dv * self.kept).mT, _over_group(self.dout)),
        }


def _captured_terms(call: _Call, score_gradients: Tensor) -> Results:
    """The same for what the scores captured and whose gradient is wanted."""
    made = call.captured_sums(lambda term: torch.as_tensor(term).square(), score_gradients.square())
    # Twice, because terms that are added up along a row share the roundings of its delta and its log-sum-exp.
    return {name: 2 * squares.sqrt() for name, squares in made.items()}


def _captured_roundings(call: _Call, score_gradients: Tensor, of_delta: Tensor) -> Results:
    """For the same tensors, what each pair's own rounding and the one of delta that all pairs of a row share give.

    The variance of a sum of sums over rows, each times a sign, is the mean of its square over random signs.
    """
    squares = call.captured_sums(lambda term: torch.as_tensor(term).square(), score_gradients.square())
    generator = torch.Generator(of_delta.device).manual_seed(0)
    for _ in range(SIGNS):
        signs = torch.randint(2, of_delta[..., :1].shape, generator=generator, device=of_delta.device) * 2 - 1
        for name, total in call.captured_sums(lambda term: term, signs * of_delta).items():
            squares[name] += total.square() / SIGNS
    return {name: total.sqrt() for name, total in squares.items()}


def _captured(features: Features) -> dict[str, Tensor]:
    """The tensors that change scores, by the names of their gradients, in the order of `Aux.score_aux`."""
    alone = {f"d{name}": features[name] for name in ("alibi_slopes", "bias") if features.get(name) is not None}
    by_rules = features["scores"].tensors if features.get("scores") is not None else ()
    return alone | {f"dscores_{number}": tensor for number, tensor in enumerate(by_rules)}


def _score_terms(options: Options, scores: Tensor, size: Tensor, pairs: Pairs, captured: Sequence[Tensor]) -> Tensor:
    """The size of what is added up to make each score, from that of q kᵀ: a rule is taken for the line that touches it.

    Its slope multiplies what was there, and what the line crosses the axis at is added to it.
    """
    rest = iter(captured)
    for leaf in options.score_rules:
        own = [next(rest) for _ in range(tensors_of(leaf))]
        rule = options._replace(softcap=None, scores=(leaf,))
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
