"""What results are compared with: attention in float64, naive in the inputs' own dtype, and the size of its terms."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ..attention import attention
from ..attention.spec import Causal
from ..attention.validation import check
from .evaluation import Results, evaluate
from .inputs import Inputs


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
        _, right = spec.band(q_len, k_len)
        seen = torch.arange(k_len, device=q.device) <= torch.arange(q_len, device=q.device)[:, None] + right
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, math.inf))
    score_terms = _root_sum_square(q, k.mT) * abs(spec.scale)
    largest = score_terms.masked_fill(scores == -math.inf, 0.0).amax(-1) if k_len else 0.0
    delta_terms = torch.linalg.vector_norm(dout * (weights @ v), dim=-1, keepdim=True)
    if return_lse:
        delta_terms = delta_terms + dlse.abs()
    # Weights inherit the rounding of their scores; in a backward pass that has only the log-sum-exp to start from, its
    # rounding too. Both are done in float32 at least, which is beneath notice for 16-bit results.
    notable = inputs.q.dtype.itemsize > 2
    weights_once = weights * (1.0 + score_terms * notable)
    weights_again = weights_once + weights * lse.masked_fill(lse.isinf(), 0.0).abs() * notable
    score_gradients = weights_again * (_root_sum_square(dout, v.mT) + delta_terms) * abs(spec.scale)
    return {
        "out": _root_sum_square(weights_once, v),
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
    left_unit, right_unit = unit_of(left), unit_of(right)
    left, right = left / left_unit, right / right_unit
    return ((left * left) @ (right * right)).sqrt() * (left_unit * right_unit)


def unit_of(x: Tensor) -> Tensor:
    """The largest magnitude: squares of what is divided by it neither overflow nor vanish. 1 if there is none but 0."""
    largest = x.abs().amax() if x.numel() else x.new_zeros(())
    return torch.where(largest > 0, largest, 1.0)
