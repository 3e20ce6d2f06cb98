"""Statistics of rows of scores in plain PyTorch operations, in tiles: memory grows with the length, not its square.

With s the scores of a row and its sink, m their maximum, L = sum exp(s - m) and W = sum exp(s - m) (m - s), the
log-sum-exp is m + log L, and the entropy of softmax(s) is log L + W / L. Neither log L nor W is negative, so nothing
cancels, however large the scores are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ...kernels.call import Aux, Options, Wanted
from ...kernels.layouts import rows_like
from .. import tiled
from ..pairs import Pairs, changed_scores, scores_and_slopes
from ..precision import without_autocast
from ..tiled import GROUPED, PRODUCTS, SUMS_OF_KEYS, SUMS_OF_QUERIES, UNGROUPED, before_any_key, hidden, tiles_seen

ROWS = "... (kv group) row -> ... kv group row 1"
"""One number a row of q, for each column of its scores."""


class StatisticsGradients(NamedTuple):
    """The gradients of q and k, and those wanted of the sinks and of what score rules captured."""

    q: Tensor
    k: Tensor
    sinks: Tensor | None
    score_aux: tuple[Tensor | None, ...]


def forward(
    q: Float[Tensor, "*batch q_heads q_len d"], k: Float[Tensor, "*batch kv_heads k_len d"], options: Options, aux: Aux
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp, the largest score and the entropy of each row, in float32 (float64 for float64 inputs)."""
    with without_autocast(q.device):
        wide = torch.promote_types(q.dtype, torch.float32)
        lse, max_scores, entropy = (q.new_empty(q.shape[:-1], dtype=wide) for _ in range(3))
        lengths = q.shape[-2], k.shape[-2]
        band = options.band(*lengths, packed=aux.cu_seqlens_q is not None)
        for rows, seen in tiles_seen(*lengths, tiled.TILE_Q, tiled.TILE_K, band, aux, options.bottom_right):
            q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=max(1, k.shape[-3]))
            maximum, total = before_any_key(q_tile, k, aux.sinks, 1.0)
            largest, weighted = torch.full_like(maximum, -math.inf), torch.zeros_like(maximum)
            for columns in seen:
                pairs = Pairs.of(options, aux, q, k, rows, columns)
                scores = einsum(q_tile, k[..., columns, :].to(wide), PRODUCTS) * options.scale
                scores = hidden(changed_scores(options, scores, pairs, aux.score_aux), options, pairs, band, aux)
                largest = torch.maximum(largest, scores.amax(-1))
                new_maximum = torch.maximum(maximum, largest)
                # A row that has seen nothing yet has a maximum of -inf; -inf - -inf would be NaN.
                pivot = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)
                below, growth = pivot[..., None] - scores, pivot - maximum
                exponentials, rescale = torch.exp(-below), torch.exp(-growth)
                # 0 times an infinite distance is 0 here.
                weighted = (weighted + total * finite(growth)) * rescale + (exponentials * finite(below)).sum(-1)
                total = total * rescale + exponentials.sum(-1)
                maximum = new_maximum
            log_total = torch.log(total)
            # A score of +inf has NaN for its exponential, and so for the total.
            row_lse = torch.where(maximum == math.inf, maximum, maximum + log_total)
            row_entropy = (log_total + weighted / total).masked_fill(total == 0, 0.0)
            for target, source in ((lse, row_lse), (max_scores, largest), (entropy, row_entropy)):
                target[..., rows] = rearrange(source, "... kv group row -> ... (kv group) row")
        return lse, max_scores, entropy


def finite(distances: Tensor) -> Tensor:
    """Distances of at least 0, 0 in place of +inf."""
    return distances.masked_fill(distances == math.inf, 0.0)


def backward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    lse: Float[Tensor, "*batch q_heads q_len"],
    entropy: Float[Tensor, "*batch q_heads q_len"],
    dlse: Float[Tensor, "*batch q_heads q_len"] | None,
    dentropy: Float[Tensor, "*batch q_heads q_len"] | None,
    options: Options,
    aux: Aux,
    wanted: Wanted,
) -> StatisticsGradients:
    """The gradients from those of the log-sum-exp and of the entropy, None for 0; lse and entropy are `forward`'s.

    With P the probabilities and H = -sum P log P the entropy, dS = P ∘ (dlse - dH (log P + H)), for a sink too. Then
    dQ = dS k · scale and dK = dSᵀ q · scale, of dS times the slope of the rules that change scores.
    """
    with without_autocast(q.device):
        wide = torch.promote_types(q.dtype, torch.float32)
        dlse, dentropy = (torch.zeros_like(lse) if x is None else x for x in (dlse, dentropy))
        dq, dk = (rows_like(x, x.shape[-1]).empty(wide, x.device).zero_() for x in (q, k))
        of_captured = {n: torch.zeros_like(x, dtype=wide) for n, x in enumerate(aux.score_aux) if wanted.score_aux[n]}
        lengths = q.shape[-2], k.shape[-2]
        band = options.band(*lengths, packed=aux.cu_seqlens_q is not None)
        kv = max(1, k.shape[-3])
        of_rows = lse, entropy, dlse, dentropy
        for rows, seen in tiles_seen(*lengths, tiled.TILE_Q, tiled.TILE_K, band, aux, options.bottom_right):
            q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=kv)
            row = [rearrange(x[..., rows], ROWS, kv=kv) for x in of_rows]
            for columns in seen:
                pairs = Pairs.of(options, aux, q, k, rows, columns)
                k_tile = k[..., columns, :].to(wide)
                scores = einsum(q_tile, k_tile, PRODUCTS) * options.scale
                scores, slope, terms = scores_and_slopes(options, scores, pairs, aux.score_aux, wanted.score_aux)
                dscores = score_gradient(hidden(scores, options, pairs, band, aux), *row)
                for term in terms:
                    term.add_to(of_captured, dscores, pairs, rows, columns)
                dscores = dscores * slope * options.scale
                dk[..., columns, :] += einsum(dscores, q_tile, SUMS_OF_QUERIES)
                dq[..., rows, :] += rearrange(einsum(dscores, k_tile, SUMS_OF_KEYS), UNGROUPED)
        sinks = None if aux.sinks is None or not wanted.sinks else sink_gradient(aux.sinks, *of_rows)
        score_aux = [of_captured[n].to(x.dtype) if n in of_captured else None for n, x in enumerate(aux.score_aux)]
        return StatisticsGradients(dq.to(q.dtype), dk.to(k.dtype), sinks, tuple(score_aux))


def sink_gradient(sinks: Tensor, lse: Tensor, entropy: Tensor, dlse: Tensor, dentropy: Tensor) -> Tensor:
    """The gradient (heads,) of sinks, which are scores of every row."""
    dsinks = score_gradient(sinks.to(lse.dtype)[:, None].expand(lse.shape), lse, entropy, dlse, dentropy)
    return dsinks.sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)


def score_gradient(scores: Tensor, lse: Tensor, entropy: Tensor, dlse: Tensor, dentropy: Tensor) -> Tensor:
    """P ∘ (dlse - dH (log P + H)); 0 in rows that see nothing, NaN in those that see a score of +inf."""
    lse = lse.masked_fill(lse == math.inf, math.nan).masked_fill(lse == -math.inf, math.inf)
    log_p = scores - lse
    p = torch.exp(log_p)
    return p * (dlse - dentropy * (log_p.masked_fill(p == 0, 0.0) + entropy))
