"""Self-attention as a layer: projections and positions around the attention of this library."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attention import Attention, Implementation
from .cache import LayerCache
from .config import check_heads, check_size
from .layers import Linear, Place, RotaryEmbedding


class MultiHeadAttention(nn.Module):
    """Causal self-attention of several heads: Vaswani et al. (2017), with any implementation of this library.

    Args:
        d_model: the width of what comes in and goes out.
        num_heads: of queries; divides d_model.
        num_kv_heads: of keys and values, each of which serves a group of query heads (Ainslie et al., 2023); divides
            num_heads, which it is if None.
        rope: rotates queries and keys; None for no positions. Layers may share one.
        window: how many tokens a query sees, its own among them; None for all before it.
        attn: an ``impl`` of `cs336_systems.attention.attention`. A named one computes every call but those of a cache
            that is not empty.
        device, dtype: of the weights.

    Raises:
        TypeError, ValueError: sizes do not divide one another, or an argument is not what it has to be.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        rope: RotaryEmbedding | None = None,
        window: int | None = None,
        attn: str | Implementation = "auto",
        device: Place = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": kv_heads}.items():
            check_size(name, size)
        check_heads(d_model, num_heads, kv_heads)
        if window is not None:
            check_size("window", window)
        self.d_head = d_model // num_heads
        self.rope = rope
        self.attend = Attention(causal=True, window=None if window is None else (window - 1, 0), impl=attn)
        self.q_proj = Linear(d_model, num_heads * self.d_head, device, dtype)
        self.k_proj = Linear(d_model, kv_heads * self.d_head, device, dtype)
        self.v_proj = Linear(d_model, kv_heads * self.d_head, device, dtype)
        self.output_proj = Linear(num_heads * self.d_head, d_model, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "#batch length"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """What each position gathers from those before it and from itself, in x's dtype, or autocast's.

        Args:
            x: what queries, keys and values are made of.
            positions: for RoPE alone; 0, 1, 2, ... if None. Which keys a query sees follows from the order in x.
            cache: holds the keys and values of earlier tokens, which queries see too; those of x are written to it.
        """
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (rearrange(y, "batch length (heads d) -> batch heads length d", d=self.d_head) for y in projected)
        if self.rope is not None:
            of_all_heads = None if positions is None else rearrange(positions, "batch length -> batch 1 length")
            q, k = self.rope(q, of_all_heads), self.rope(k, of_all_heads)
        out = self.attend(q, k, v) if cache is None else cache.attend(self.attend, q, k, v)
        return self.output_proj(rearrange(out, "batch heads length d -> batch length (heads d)"))
