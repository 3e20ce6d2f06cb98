"""The functions of ``torch.nn.attention.flex_attention``, by this library: code that uses them changes its import.

>>> from cs336_systems.compat.flex_attention import create_block_mask, flex_attention
>>> block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, B=None, H=None, Q_LEN=n, KV_LEN=n)
>>> out = flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx],
...                      block_mask=block_mask)

Nothing has to be compiled. On a CPU it trains too, and what a score_mod captures gets a gradient on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..attention import attention, score_statistics
from ..attention.mods import MaskMod, ScoreMod, as_scores
from ..attention.mods import mask_mod as traced
from ..attention.rules import Mask
from ..kernels.call import BLOCK
from .arguments import check_shape

__all__ = ["AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_block_mask", "create_mask", "flex_attention"]
__all__ += ["noop_mask", "or_masks"]


class AuxRequest(NamedTuple):
    """What `flex_attention` returns besides its output."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for by `AuxRequest`; None for the rest."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask with the blocks of pairs that it leaves anything of, of `BLOCK` queries by `BLOCK` keys.

    Attributes:
        mask_mod: the function of the mask.
        mask: the same as `attention` takes it.
        shape: (B or 1, H or 1, Q_LEN, KV_LEN).
    """

    mask_mod: MaskMod
    mask: Mask
    shape: tuple[int, int, int, int]

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(Q_LEN, KV_LEN)."""
        return self.shape[2], self.shape[3]

    def to_dense(self) -> Int[Tensor, "B H q_blocks kv_blocks"]:
        """1 for each block that has a visible pair, 0 for the others."""
        assert self.mask.blocks is not None
        lists = self.mask.blocks.rows
        visible, order = lists[..., :2].sum(-1, keepdim=True), lists[..., 2:-1]
        listed = torch.arange(order.shape[-1], device=lists.device) < visible
        dense = torch.zeros_like(order).scatter_(-1, order.long(), listed.to(lists.dtype))
        return dense.expand(*self.shape[:2], -1, -1)

    def sparsity(self) -> float:
        """The percentage of blocks that have no visible pair."""
        return 100.0 * (1.0 - self.to_dense().float().mean().item())

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%)"


def flex_attention(
    query: Float[Tensor, "batch q_heads q_len d"],
    key: Float[Tensor, "batch kv_heads k_len d"],
    value: Float[Tensor, "batch kv_heads k_len dv"],
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """softmax(score_mod(query keyᵀ · scale)) value over the pairs that block_mask leaves.

    Args:
        query: (batch, q_heads, q_len, d), in float16, bfloat16, float32 or float64.
        key: (batch, kv_heads, k_len, d).
        value: (batch, kv_heads, k_len, dv).
        score_mod: of (score, b, h, q_idx, kv_idx); see `cs336_systems.attention.mods`.
        block_mask: of `create_block_mask`, for the lengths of this call.
        scale: 1 / sqrt(d) if None.
        enable_gqa: whether key and value may have fewer heads; their number divides q_heads.
        return_lse: also return the log-sum-exp (batch, q_heads, q_len), natural and differentiable.
        kernel_options: must be None: these are sizes of FlexAttention's own kernels.
        return_aux: in place of return_lse, what to return in an `AuxOutput`. Its max_scores (batch, q_heads, q_len),
            float32 (float64 for float64 inputs), are each query's largest score after score_mod, -inf where it sees no
            key, and have no gradient. `score_statistics` computes them: half of a forward more.

    Returns:
        out (batch, q_heads, q_len, dv), or a pair. A query that sees no key gets 0, and -inf for its log-sum-exp.

    Raises:
        TypeError, ValueError: an argument is not what it has to be; `attention` and `mods` say more.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_shape(name, x, "batch", "heads", "length", "d")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key must have the {query.shape[1]} heads of query unless enable_gqa is True; got {key.shape[1]}"
        )
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask of this module; got {type(block_mask).__name__}")
    if kernel_options:
        raise ValueError(f"kernel_options must be None: tiles are chosen by this library; got {kernel_options}")
    if return_aux is not None and return_lse:
        raise ValueError("return_lse must be False if return_aux is given; got True")
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    mask = None if block_mask is None else block_mask.mask
    scores = as_scores(score_mod, query)
    found = attention(query, key, value, scores=scores, mask=mask, scale=scale, return_lse=wants_lse)
    if return_aux is None:
        return found
    out, lse = (found, None) if isinstance(found, Tensor) else found
    max_scores = None
    if return_aux.max_scores:
        with torch.no_grad():
            max_scores = score_statistics(query, key, scores=scores, mask=mask, scale=scale).max_scores
    return out, AuxOutput(lse, max_scores)


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = BLOCK,
) -> BlockMask:
    """The mask of a function of (b, h, q_idx, kv_idx), and the blocks that it leaves anything of.

    It serves all calls of these lengths until what the function captures changes.

    Args:
        B, H: batch entries and query heads of the calls; None where the mask is the same for all, or where the
            tensors that it captures have an axis for them.
        device: of the calls; that of what the function captures, or torch's default, if None.
        BLOCK_SIZE: must be `BLOCK`, 128: the kernels here visit blocks of this size.

    Raises:
        TypeError, ValueError: an argument is not what it has to be, or B or H is None where it is needed.
    """
    if BLOCK_SIZE not in (BLOCK, (BLOCK, BLOCK)):
        raise ValueError(f"BLOCK_SIZE must be {BLOCK}, the blocks of the kernels here; got {BLOCK_SIZE}")
    mask = traced(mask_mod).with_blocks(Q_LEN, KV_LEN, batch=B, heads=H, device=device)
    return BlockMask(mask_mod, mask, (B or 1, H or 1, Q_LEN, KV_LEN))


def create_mask(
    mod_fn: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "B H Q_LEN KV_LEN"]:
    """The mask of a function of (b, h, q_idx, kv_idx) as a tensor, True where a query sees a key; to look at."""
    return traced(mod_fn).to_tensor(Q_LEN, KV_LEN, batch=B or 1, heads=H or 1, device=device)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The function of the pairs that all of these leave."""

    def every(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = noop_mask(b, h, q_idx, kv_idx)
        for each in mask_mods:
            seen = seen & each(b, h, q_idx, kv_idx)
        return seen

    return every


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The function of the pairs that any of these leaves."""

    def some(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = ~noop_mask(b, h, q_idx, kv_idx)
        for each in mask_mods:
            seen = seen | each(b, h, q_idx, kv_idx)
        return seen

    return some


def noop_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Leaves every pair."""
    return q_idx.new_ones((), dtype=torch.bool)
