"""Attention, exact, in several implementations behind one function.

`attention` chooses an implementation or takes the one named; `explain` says what it would choose and why. Each
implementation is also an nn.Module, and the two FlashAttention-2 ones are autograd Functions. `attention_with_cache` is
for the new tokens of generation.
"""

from .api import attention, explain
from .cached import attention_with_cache, explain_with_cache
from .choose import Explanation, Implementation
from .flash import FlashAttentionFunction
from .modules import (
    Attention,
    CompiledAttention,
    FlashAttention,
    NaiveAttention,
    SDPAAttention,
    TiledAttention,
)
from .spec import AttentionSpec, Causal
from .tiled import TiledAttentionFunction
from .varlen import attention_varlen, explain_varlen

__all__ = [
    "Attention",
    "AttentionSpec",
    "Causal",
    "CompiledAttention",
    "Explanation",
    "FlashAttention",
    "FlashAttentionFunction",
    "Implementation",
    "NaiveAttention",
    "SDPAAttention",
    "TiledAttention",
    "TiledAttentionFunction",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "explain",
    "explain_varlen",
    "explain_with_cache",
]
