"""Attention, exact, in several implementations behind one function.

`attention` chooses an implementation or takes the one named; `explain` says what it would choose and why. Each
implementation is also an nn.Module, and the two FlashAttention-2 ones are autograd Functions.
"""

from .api import attention, explain
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
    "explain",
    "explain_varlen",
]
