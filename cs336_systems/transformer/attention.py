"""Self-attention as a layer: projections and RoPE around this library's attention."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device

from ..attention import Attention, Implementation
from .cache import Step
from .config import check_heads, check_size
from .layers import Linear, RotaryEmbedding


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention: Vaswani et al. (2017), with any implementation of this library.

    Args:
        d_model, num_heads, num_kv_heads, window: see `TransformerConfig`.
        rope: rotates queries and keys; layers may share it. None for no position embedding.
        attn: the ``impl`` of `cs336_systems.attention.attention`. It does not apply to calls with a cache that already
            has tokens, for which "auto" chooses.
        device, dtype: of the weights.

    Raises TypeError or ValueError if sizes do not divide one another, or an argument is invalid.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        rope: RotaryEmbedding | None = None,
        window: int | None = None,
        attn: str | Implementation = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_heads(d_model, num_heads, kv_heads)
        if window is not None:
            check_size("window", window)
        self.d_head = d_model // num_heads
        self.rope = rope
        self.attend = Attention(causal=True, window=None if window is None else (window - 1, 0), impl=attn)
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, kv_heads * self.d_head, device, dtype)
        self.v_proj = Linear(d_model, kv_heads * self.d_head, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "#batch length"] | None = None,
        cache: Step | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Attention of each token to itself and earlier ones, in x's dtype, or autocast's.

        Args:
            positions: for RoPE only; 0, 1, 2, ... if None. The causal mask follows the order in x.
            cache: stores the keys and values of x, after those of earlier tokens, which x attends to as well.
        """
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (rearrange(y, "batch length (heads d) -> batch heads length d", d=self.d_head) for y in projected)
        if self.rope is not None:
            positions = None if positions is None else positions[:, None]  # the same for all heads
            q, k = self.rope(q, positions), self.rope(k, positions)
        out = self.attend(q, k, v) if cache is None else cache.attend(self.attend, q, k, v)
        return self.output_proj(rearrange(out, "batch heads length d -> batch length (heads d)"))
