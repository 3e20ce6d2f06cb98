"""FlashAttention-2 in plain PyTorch operations, forward and backward: the version to read, and to learn from.

Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning" (2023), algorithms 1 and 2.
Scores exist one tile at a time, so memory grows with the length, not with its square. What the backward needs of the
softmax is one number a row, the log-sum-exp. Everything is accumulated in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from ..kernels.layout import rows_like
from ..kernels.settings import Window
from ..kernels.lib.reductions import sink_gradient
from .choose import ARGUMENTS, Implementation, spec_for
from .derivatives import differentiable_once
from .ops import must_dispatch
from .pairs import Extras, Pairs, by_group, changed_scores, kept_pairs, scores_and_slopes, seen_pairs
from .precision import autocast_inputs, without_autocast
from .spec import AttentionSpec

TILE_Q = 512
TILE_K = 512
"""Rows of q and of k in a tile: large enough that time goes into products rather than into Python."""

GROUPED = "... (kv group) row d -> ... kv group row d"
UNGROUPED = "... kv group row d -> ... (kv group) row d"
PRODUCTS = "... kv group row d, ... kv column d -> ... kv group row column"
SUMS_OF_KEYS = "... kv group row column, ... kv column d -> ... kv group row d"
SUMS_OF_QUERIES = "... kv group row column, ... kv group row d -> ... kv column d"


def tiles(length: int, size: int) -> Iterator[slice]:
    """Slices that cover range(length), ``size`` at a time."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def tiles_seen(
    length: int, size: int, rows: slice, band: Window, starts: tuple[Tensor, Tensor] | None
) -> Iterator[slice]:
    """The tiles of keys that some of these rows may see; ``starts`` are where packed sequences begin."""
    if starts is not None:
        yield from _tiles_of_sequences(length, size, rows, *starts)
        return
    left, right = band
    for columns in tiles(length, size):
        after = right is not None and columns.start > rows.stop - 1 + right
        before = left is not None and columns.stop - 1 < rows.start + left
        if not (after or before):
            yield columns


def _tiles_of_sequences(length: int, size: int, rows: slice, q_starts: Tensor, k_starts: Tensor) -> Iterator[slice]:
    """The tiles that hold keys of the sequences of these rows; all of them where looking would stop the device."""
    first, stop = 0, length
    if q_starts.device.type == "cpu" and not must_dispatch(q_starts, k_starts):
        q_first, k_first = q_starts.tolist(), k_starts.tolist()
        last = len(q_first) - 2
        first = k_first[min(last, max(0, bisect_right(q_first, rows.start) - 1))]
        stop = k_first[min(last, max(0, bisect_left(q_first, rows.stop) - 1)) + 1]
    for columns in tiles(length, size):
        if columns.stop > first and columns.start < stop:
            yield columns


def hidden(scores: Tensor, spec: AttentionSpec, pairs: Pairs, band: Window, extras: Extras) -> Tensor:
    """Scores of a tile, -inf where a pair is not visible."""
    seen = seen_pairs(spec, pairs, band, extras)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def forward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    spec: AttentionSpec,
    extras: Extras,
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"]]:
    """The output and the log-sum-exp of each row of scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty_strided(*rows_like(q, v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    band = spec.band(q.shape[-2], k.shape[-2])
    # Weights add up to 1 at most, so that no sum of values is beyond the range that they have.
    share = 2.0 ** -(k.shape[-2] + 1).bit_length()
    for rows in tiles(q.shape[-2], TILE_Q):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=max(1, k.shape[-3]))
        accumulated = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        maximum, total = before_any_key(q_tile, k, extras.sinks, share)
        for columns in tiles_seen(k.shape[-2], TILE_K, rows, band, extras.starts):
            pairs = Pairs.of(spec, extras, q, k, rows, columns)
            scores = einsum(q_tile, k[..., columns, :].to(wide), PRODUCTS) * spec.scale
            scores = hidden(changed_scores(spec, scores, pairs, extras.by_scores), spec, pairs, band, extras)
            new_maximum = torch.maximum(maximum, scores.amax(-1))
            # A row that has seen nothing yet has a maximum of -inf; -inf - -inf would be NaN.
            pivot = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
            weights = torch.exp(scores - pivot[..., None]) * share
            rescale = torch.exp(maximum - pivot)
            total = total * rescale + weights.sum(-1)
            if extras.seed is not None:
                weights = weights.masked_fill(~kept_pairs(spec, pairs, extras.seed), 0.0) * spec.as_settings.kept_scale
            accumulated = accumulated * rescale[..., None] + einsum(weights, v[..., columns, :].to(wide), SUMS_OF_KEYS)
            maximum = new_maximum
        blind = total == 0
        normalised = accumulated / total.masked_fill(blind, 1.0)[..., None]
        out[..., rows, :] = rearrange(normalised, UNGROUPED)
        # A score of +inf has NaN for a weight, and so for a total.
        row_lse = torch.where(maximum == float("inf"), maximum, maximum + torch.log(total / share))
        lse[..., rows] = rearrange(row_lse, "... kv group row -> ... (kv group) row")
    return out, lse


def before_any_key(q_tile: Tensor, k: Tensor, sinks: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """Each row's largest score and sum of weights before it has seen a key: those of its head's sink."""
    maximum = q_tile.new_full(q_tile.shape[:-1], float("-inf"))
    if sinks is None:
        return maximum, torch.zeros_like(maximum)
    maximum = torch.maximum(maximum, by_group(sinks.to(maximum.dtype), k))
    return maximum, (maximum != float("-inf")).to(maximum.dtype) * share


def backward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    out: Float[Tensor, "*batch q_heads q_len dv"],
    lse: Float[Tensor, "*batch q_heads q_len"],
    dout: Float[Tensor, "*batch q_heads q_len dv"],
    dlse: Float[Tensor, "*batch q_heads q_len"] | None,
    spec: AttentionSpec,
    extras: Extras,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor | None]]:
    """The gradients of q, k and v, of the sinks, and of what rules for scores captured, where those are ``wanted``.

    With P the probabilities and dP = dout vᵀ: dV = Pᵀ dout, dS = P ∘ (dP - delta), dQ = dS k · scale and
    dK = dSᵀ q · scale, where delta is rowsum(dout ∘ out), minus the gradient of the log-sum-exp, which reaches each
    score through its P. Rules that change scores come between: dQ and dK take dS times their slope.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = reduce(dout.to(wide) * out.to(wide), "... row d -> ... row", "sum")
    if dlse is not None:
        delta = delta - dlse
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    of_captured = {
        number: torch.zeros_like(x, dtype=wide) for number, x in enumerate(extras.by_scores) if wanted[number]
    }
    band = spec.band(q.shape[-2], k.shape[-2])
    kv = max(1, k.shape[-3])
    for rows in tiles(q.shape[-2], TILE_Q):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=kv)
        dout_tile = rearrange(dout[..., rows, :].to(wide), GROUPED, kv=kv)
        row_lse = rearrange(lse[..., rows, None], GROUPED, kv=kv)
        row_delta = rearrange(delta[..., rows, None], GROUPED, kv=kv)
        # exp(-inf - +inf) is 0: rows that see nothing have no weights. Those that see a score of +inf have NaN.
        row_lse = row_lse.masked_fill(row_lse == float("inf"), float("nan"))
        row_lse = row_lse.masked_fill(row_lse == float("-inf"), float("inf"))
        for columns in tiles_seen(k.shape[-2], TILE_K, rows, band, extras.starts):
            pairs = Pairs.of(spec, extras, q, k, rows, columns)
            k_tile, v_tile = k[..., columns, :].to(wide), v[..., columns, :].to(wide)
            scores = einsum(q_tile, k_tile, PRODUCTS) * spec.scale
            scores, slope, terms = scores_and_slopes(spec, scores, pairs, extras.by_scores, wanted)
            weights = torch.exp(hidden(scores, spec, pairs, band, extras) - row_lse)
            dweights = einsum(dout_tile, v_tile, PRODUCTS)
            kept = weights
            if extras.seed is not None:
                dropped = ~kept_pairs(spec, pairs, extras.seed)
                kept, dweights = (
                    x.masked_fill(dropped, 0.0) * spec.as_settings.kept_scale for x in (weights, dweights)
                )
            dscores = weights * (dweights - row_delta)
            for term in terms:
                term.add_to(of_captured, dscores, pairs, rows, columns)
            dscores = dscores * slope * spec.scale
            dv[..., columns, :] += einsum(kept, dout_tile, SUMS_OF_QUERIES)
            dk[..., columns, :] += einsum(dscores, q_tile, SUMS_OF_QUERIES)
            dq[..., rows, :] += rearrange(einsum(dscores, k_tile, SUMS_OF_KEYS), UNGROUPED)
    of_sinks = None if extras.sinks is None else sink_gradient(extras.sinks, lse, delta)
    rounded = [of_captured[n].to(x.dtype) if n in of_captured else None for n, x in enumerate(extras.by_scores)]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, rounded


class TiledAttentionFunction(torch.autograd.Function):
    """`forward` and `backward` as an autograd Function: ``TiledAttentionFunction.apply(q, k, v, is_causal)``.

    q is (batch, q_len, d) or (*batch, q_heads, q_len, d). Saves q, k, v, the output and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool | str | AttentionSpec = False,
        scale: float | None = None,
        return_lse: bool = False,
        *extras: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The arguments are `attention`'s; ``is_causal`` may also be a spec, which is taken as validated.

        Then ``extras`` are the tensors that it asks for, in the order of `pairs.Extras`.
        """
        q, k, v = autocast_inputs(q, k, v)
        ctx.spec = spec_for(Implementation.TILED, q, k, v, is_causal, scale, return_lse)
        with without_autocast(q.device):
            out, lse = forward(q, k, v, ctx.spec, Extras.of(ctx.spec, extras))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, *extras)
        return (out, lse) if return_lse else out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, the sinks and what rules for scores captured; None for the other arguments."""
        q, k, v, out, lse, *extras = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        parts = Extras.of(ctx.spec, extras)
        before = len(extras) - len(parts.by_scores)
        wanted = ctx.needs_input_grad[ARGUMENTS + before :]
        with without_autocast(q.device):
            *gradients, of_sinks, of_captured = backward(q, k, v, out, lse, dout, dlse, ctx.spec, parts, wanted)
        other = [None] * (before - ctx.spec.sinks)
        return *gradients, None, None, None, *[of_sinks] * ctx.spec.sinks, *other, *of_captured
