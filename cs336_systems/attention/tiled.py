"""FlashAttention-2 in plain PyTorch operations, forward and backward: the version to read, and to learn from.

Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning" (2023), algorithms 1 and 2.
Scores exist one tile at a time, so memory grows with the length, not with its square. What the backward needs of the
softmax is one number a row, the log-sum-exp. Everything is accumulated in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from ..kernels.call import Aux, Band, Gradients, Options, Wanted
from ..kernels.layouts import rows_like
from ..kernels.lib.reductions import sink_gradient
from ..kernels.torch_names import must_dispatch
from .pairs import Pairs, by_group, changed_scores, kept_pairs, scores_and_slopes, seen_pairs
from .precision import without_autocast

TILE_Q = 512
TILE_K = 512
"""Rows of q and of k in a tile: large enough that time goes into products rather than into Python."""
SHORT = 64
"""Packed sequences share a tile while they have at most this many rows together: few of its pairs are of two."""

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
    q_len: int, k_len: int, tile_q: int, tile_k: int, band: Band, aux: Aux, bottom_right: bool
) -> Iterator[tuple[slice, Iterator[slice]]]:
    """Each tile of queries, with the tiles of keys that some of its rows may see.

    Of packed sequences whose lengths are known, a tile of queries is of one, or of several short ones.
    """
    starts = _known_starts(aux)
    if starts is None:
        limits = band if aux.cu_seqlens_q is None else (None, None)
        for rows in tiles(q_len, tile_q):
            yield rows, _within(limits, rows, tiles(k_len, tile_k))
        return
    q_starts, k_starts = starts
    begin, stops = 0, [*q_starts[1:], q_len]
    for stop, following in zip(stops, [*stops[1:], math.inf], strict=True):
        if following - begin > min(SHORT, tile_q):
            for rows in _shifted(tiles(stop - begin, tile_q), begin):
                yield rows, _keys_of_sequences(rows, tile_k, band, q_starts, k_starts, bottom_right)
            begin = stop


def _keys_of_sequences(
    rows: slice, size: int, band: Band, q_starts: list[int], k_starts: list[int], bottom_right: bool
) -> Iterator[slice]:
    """The tiles that hold keys of the sequences of these rows; of a single one, those within the band."""
    last = len(q_starts) - 2
    one, other = (
        min(last, max(0, place - 1)) for place in (bisect_right(q_starts, rows.start), bisect_left(q_starts, rows.stop))
    )
    first, stop = k_starts[one], k_starts[other + 1]
    # The band is relative to the diagonal of a sequence.
    shift = first - q_starts[one]
    if bottom_right:
        shift += (stop - first) - (q_starts[one + 1] - q_starts[one])
    left, right = (None if side is None or one != other else side + shift for side in band)
    return _within((left, right), rows, _shifted(tiles(stop - first, size), first))


def _within(band: Band, rows: slice, columns: Iterator[slice]) -> Iterator[slice]:
    """The tiles of keys in which some of these rows has a key between the limits."""
    left, right = band
    for tile in columns:
        after = right is not None and tile.start > rows.stop - 1 + right
        before = left is not None and tile.stop - 1 < rows.start + left
        if not (after or before):
            yield tile


def _known_starts(aux: Aux) -> tuple[list[int], list[int]] | None:
    """Where packed sequences begin; None where looking would stop the device, or there are none."""
    q_starts, k_starts = aux.cu_seqlens_q, aux.cu_seqlens_k
    if q_starts is None or k_starts is None or q_starts.device.type != "cpu" or must_dispatch(q_starts, k_starts):
        return None
    return q_starts.tolist(), k_starts.tolist()


def _shifted(slices: Iterator[slice], by: int) -> Iterator[slice]:
    return (slice(each.start + by, each.stop + by) for each in slices)


def hidden(scores: Tensor, options: Options, pairs: Pairs, band: Band, aux: Aux) -> Tensor:
    """Scores of a tile, -inf where a pair is not visible."""
    seen = seen_pairs(options, pairs, band, aux.mask_aux)
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))


def forward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    options: Options,
    aux: Aux,
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"]]:
    """The output and the log-sum-exp of each row of scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty_strided(*rows_like(q, v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    band = options.band(q.shape[-2], k.shape[-2], packed=aux.cu_seqlens_q is not None)
    # Weights add up to 1 at most, so that no sum of values is beyond the range that they have.
    share = 2.0 ** -(k.shape[-2] + 1).bit_length()
    for rows, seen in tiles_seen(q.shape[-2], k.shape[-2], TILE_Q, TILE_K, band, aux, options.bottom_right):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=max(1, k.shape[-3]))
        accumulated = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        maximum, total = before_any_key(q_tile, k, aux.sinks, share)
        for columns in seen:
            pairs = Pairs.of(options, aux, q, k, rows, columns)
            scores = einsum(q_tile, k[..., columns, :].to(wide), PRODUCTS) * options.scale
            scores = hidden(changed_scores(options, scores, pairs, aux.score_aux), options, pairs, band, aux)
            new_maximum = torch.maximum(maximum, scores.amax(-1))
            # A row that has seen nothing yet has a maximum of -inf; -inf - -inf would be NaN.
            pivot = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
            weights = torch.exp(scores - pivot[..., None]) * share
            rescale = torch.exp(maximum - pivot)
            total = total * rescale + weights.sum(-1)
            if aux.seed is not None:
                weights = weights.masked_fill(~kept_pairs(options, pairs, aux.seed), 0.0) * options.keep_scale
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
    options: Options,
    aux: Aux,
    wanted: Wanted,
) -> Gradients:
    """The gradients of q, k and v, of the sinks, and of what rules for scores captured, where those are ``wanted``.

    With P the probabilities and dP = dout vᵀ: dV = Pᵀ dout, dS = P ∘ (dP - delta), dQ = dS k · scale and
    dK = dSᵀ q · scale, where delta is rowsum(dout ∘ out), minus the gradient of the log-sum-exp, which reaches each
    score through its P. Rules that change scores come between: dQ and dK take dS times their slope.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = reduce(dout.to(wide) * out.to(wide), "... row d -> ... row", "sum")
    if dlse is not None:
        delta = delta - dlse
    dq, dk, dv = (rows_like(x, x.shape[-1]).empty(wide, x.device).zero_() for x in (q, k, v))
    of_captured = {
        number: torch.zeros_like(x, dtype=wide) for number, x in enumerate(aux.score_aux) if wanted.score_aux[number]
    }
    band = options.band(q.shape[-2], k.shape[-2], packed=aux.cu_seqlens_q is not None)
    kv = max(1, k.shape[-3])
    for rows, seen in tiles_seen(q.shape[-2], k.shape[-2], TILE_Q, TILE_K, band, aux, options.bottom_right):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=kv)
        dout_tile = rearrange(dout[..., rows, :].to(wide), GROUPED, kv=kv)
        row_lse = rearrange(lse[..., rows, None], GROUPED, kv=kv)
        row_delta = rearrange(delta[..., rows, None], GROUPED, kv=kv)
        # exp(-inf - +inf) is 0: rows that see nothing have no weights. Those that see a score of +inf have NaN.
        row_lse = row_lse.masked_fill(row_lse == float("inf"), float("nan"))
        row_lse = row_lse.masked_fill(row_lse == float("-inf"), float("inf"))
        for columns in seen:
            pairs = Pairs.of(options, aux, q, k, rows, columns)
            k_tile, v_tile = k[..., columns, :].to(wide), v[..., columns, :].to(wide)
            scores = einsum(q_tile, k_tile, PRODUCTS) * options.scale
            scores, slope, terms = scores_and_slopes(options, scores, pairs, aux.score_aux, wanted.score_aux)
            weights = torch.exp(hidden(scores, options, pairs, band, aux) - row_lse)
            dweights = einsum(dout_tile, v_tile, PRODUCTS)
            kept = weights
            if aux.seed is not None:
                dropped = ~kept_pairs(options, pairs, aux.seed)
                kept, dweights = (x.masked_fill(dropped, 0.0) * options.keep_scale for x in (weights, dweights))
            dscores = weights * (dweights - row_delta)
            for term in terms:
                term.add_to(of_captured, dscores, pairs, rows, columns)
            dscores = dscores * slope * options.scale
            dv[..., columns, :] += einsum(kept, dout_tile, SUMS_OF_QUERIES)
            dk[..., columns, :] += einsum(dscores, q_tile, SUMS_OF_QUERIES)
            dq[..., rows, :] += rearrange(einsum(dscores, k_tile, SUMS_OF_KEYS), UNGROUPED)
    sinks = sink_gradient(aux.sinks, lse, delta) if aux.sinks is not None and wanted.sinks else None
    score_aux = [of_captured[n].to(x.dtype) if n in of_captured else None for n, x in enumerate(aux.score_aux)]
    return Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sinks, tuple(score_aux))


class TiledPlan:
    """What runs `forward` and `backward` outside of autocast."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
        """out and log-sum-exp."""
        with without_autocast(q.device):
            return forward(q, k, v, self.options, aux)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, aux: Aux,
        wanted: Wanted,
    ) -> Gradients:  # fmt: skip
        """The gradients."""
        with without_autocast(q.device):
            return backward(q, k, v, out, lse, dout, dlse, self.options, aux, wanted)
