"""Attention, exact, by several implementations behind one function.

`attention` chooses a backend or takes the implementation named; `explain` says what it would choose and why. Each
implementation is also an nn.Module, and the two FlashAttention-2 ones are autograd Functions. `attention_varlen` takes
packed sequences, `attention_with_cache` the new tokens of generation. `score_statistics` returns the largest score and
the entropy of each query.
"""

import sys

from .api import attention, explain
from .decode import attention_with_cache, explain_with_cache
from .dispatch import use_backends
from .explanation import Explanation
from .functions import FlashAttentionFunction, TiledAttentionFunction
from .hints import UncallableModule
from .modules import (
    Attention,
    CompiledAttention,
    FlashAttention,
    NaiveAttention,
    SDPAAttention,
    TiledAttention,
)
from .statistics import ScoreStatistics, score_statistics, score_statistics_varlen
from .validation import Implementation
from .varlen import attention_varlen, explain_varlen

__all__ = [
    "Attention",
    "CompiledAttention",
    "Explanation",
    "FlashAttention",
    "FlashAttentionFunction",
    "Implementation",
    "NaiveAttention",
    "SDPAAttention",
    "ScoreStatistics",
    "TiledAttention",
    "TiledAttentionFunction",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "explain",
    "explain_varlen",
    "explain_with_cache",
    "score_statistics",
    "score_statistics_varlen",
    "use_backends",
]

# Calling the module instead would break graphs of torch.compile, and type checkers refuse it.
sys.modules[__name__].__class__ = UncallableModule
