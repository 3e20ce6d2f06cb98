"""FlashAttention-2 in plain PyTorch operations, forward and backward: the version to read, and to learn from.

Dao, "FlashAttention-2: Faster attention with better parallelism and work partitioning" (2023), algorithms 1 and 2.
Scores exist one tile at a time, so memory grows with the length, not with its square. What the backward needs of the
softmax is one number a row, the log-sum-exp. Everything is accumulated in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from .choose import Implementation, spec_for
from .derivatives import differentiable_once
from .precision import autocast_inputs, without_autocast
from .spec import AttentionSpec, Causal

TILE_Q = 512
TILE_K = 512
"""Rows of q and of k in a tile: large enough that time goes into products rather than into Python."""

GROUPED = "... (kv group) row d -> ... kv group row d"
UNGROUPED = "... kv group row d -> ... (kv group) row d"


def tiles(length: int, size: int) -> Iterator[slice]:
    """Slices that cover range(length), ``size`` at a time."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def scores_of(
    q_tile: Float[Tensor, "... kv group rows d"],
    k_tile: Float[Tensor, "... kv columns d"],
    spec: AttentionSpec,
    rows: slice,
    columns: slice,
    diagonal: int,
) -> Float[Tensor, "... kv group rows columns"] | None:
    """The scores of one tile, hidden ones -inf; None where every pair is hidden."""
    causal = spec.causal is not Causal.NONE
    if causal and columns.start > rows.stop - 1 + diagonal:
        return None
    scores = einsum(q_tile, k_tile, "... kv group row d, ... kv column d -> ... kv group row column") * spec.scale
    if causal and columns.stop - 1 > rows.start + diagonal:
        seen = spec.visible(rows, columns, diagonal, scores.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def forward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    spec: AttentionSpec,
) -> tuple[Float[Tensor, "*batch q_heads q_len dv"], Float[Tensor, "*batch q_heads q_len"]]:
    """The output and the log-sum-exp of each row of scores."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.shape[:-1], dtype=wide)
    diagonal = spec.diagonal(q.shape[-2], k.shape[-2])
    for rows in tiles(q.shape[-2], TILE_Q):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=max(1, k.shape[-3]))
        accumulated = q_tile.new_zeros(*q_tile.shape[:-1], v.shape[-1])
        maximum = q_tile.new_full(q_tile.shape[:-1], float("-inf"))
        total = torch.zeros_like(maximum)
        for columns in tiles(k.shape[-2], TILE_K):
            scores = scores_of(q_tile, k[..., columns, :].to(wide), spec, rows, columns, diagonal)
            if scores is None:
                break
            new_maximum = torch.maximum(maximum, scores.amax(-1))
            # A row that has seen nothing yet has a maximum of -inf; -inf - -inf would be NaN.
            pivot = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
            weights = torch.exp(scores - pivot[..., None])
            rescale = torch.exp(maximum - pivot)
            total = total * rescale + weights.sum(-1)
            values = einsum(
                weights, v[..., columns, :].to(wide), "... kv group row column, ... kv column d -> ... kv group row d"
            )
            accumulated = accumulated * rescale[..., None] + values
            maximum = new_maximum
        blind = total == 0
        normalised = accumulated / total.masked_fill(blind, 1.0)[..., None]
        out[..., rows, :] = rearrange(normalised, UNGROUPED)
        lse[..., rows] = rearrange(maximum + torch.log(total), "... kv group row -> ... (kv group) row")
    return out, lse


def backward(
    q: Float[Tensor, "*batch q_heads q_len d"],
    k: Float[Tensor, "*batch kv_heads k_len d"],
    v: Float[Tensor, "*batch kv_heads k_len dv"],
    out: Float[Tensor, "*batch q_heads q_len dv"],
    lse: Float[Tensor, "*batch q_heads q_len"],
    dout: Float[Tensor, "*batch q_heads q_len dv"],
    dlse: Float[Tensor, "*batch q_heads q_len"] | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    With P the probabilities and dP = dout vᵀ: dV = Pᵀ dout, dS = P ∘ (dP - delta), dQ = dS k · scale and
    dK = dSᵀ q · scale, where delta is rowsum(dout ∘ out), minus the gradient of the log-sum-exp, which reaches each
    score through its P.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = reduce(dout.to(wide) * out.to(wide), "... row d -> ... row", "sum")
    if dlse is not None:
        delta = delta - dlse
    dq = torch.zeros_like(q, dtype=wide)
    dk = torch.zeros_like(k, dtype=wide)
    dv = torch.zeros_like(v, dtype=wide)
    diagonal = spec.diagonal(q.shape[-2], k.shape[-2])
    kv = max(1, k.shape[-3])
    for rows in tiles(q.shape[-2], TILE_Q):
        q_tile = rearrange(q[..., rows, :].to(wide), GROUPED, kv=kv)
        dout_tile = rearrange(dout[..., rows, :].to(wide), GROUPED, kv=kv)
        row_lse = rearrange(lse[..., rows, None], GROUPED, kv=kv)
        row_delta = rearrange(delta[..., rows, None], GROUPED, kv=kv)
        # exp(-inf - +inf) is 0: rows that see nothing have no weights.
        row_lse = row_lse.masked_fill(row_lse == float("-inf"), float("inf"))
        for columns in tiles(k.shape[-2], TILE_K):
            k_tile, v_tile = k[..., columns, :].to(wide), v[..., columns, :].to(wide)
            scores = scores_of(q_tile, k_tile, spec, rows, columns, diagonal)
            if scores is None:
                break
            weights = torch.exp(scores - row_lse)
            dweights = einsum(dout_tile, v_tile, "... kv group row d, ... kv column d -> ... kv group row column")
            dscores = weights * (dweights - row_delta) * spec.scale
            dv[..., columns, :] += einsum(
                weights, dout_tile, "... kv group row column, ... kv group row d -> ... kv column d"
            )
            dk[..., columns, :] += einsum(
                dscores, q_tile, "... kv group row column, ... kv group row d -> ... kv column d"
            )
            dq[..., rows, :] += rearrange(
                einsum(dscores, k_tile, "... kv group row column, ... kv column d -> ... kv group row d"), UNGROUPED
            )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The arguments are `attention`'s; ``is_causal`` may also be a spec, which is taken as validated."""
        q, k, v = autocast_inputs(q, k, v)
        ctx.spec = spec_for(Implementation.TILED, q, k, v, is_causal, scale, return_lse)
        with without_autocast(q.device):
            out, lse = forward(q, k, v, ctx.spec)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        return (out, lse) if return_lse else out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Gradients of q, k and v; None for the other arguments."""
        q, k, v, out, lse = ctx.saved_tensors
        with without_autocast(q.device):
            gradients = backward(q, k, v, out, lse, torch.zeros_like(out) if dout is None else dout, dlse, ctx.spec)
        return *gradients, None, None, None
