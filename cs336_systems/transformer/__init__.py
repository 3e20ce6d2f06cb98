"""A Transformer whose attention is this library's: layers, model, presets, generation, and others' weights."""

from .attention import MultiHeadAttention
from .cache import KVCache
from .config import TransformerConfig
from .decoder import Decoder
from .generate import Sampling, generate, stream
from .layers import Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU
from .loss import head_cross_entropy
from .model import Transformer, TransformerBlock
from .presets import PRESETS, preset
from .weights import from_llama, llama_config, load_llama, load_weights

__all__ = [
    "PRESETS",
    "Decoder",
    "Embedding",
    "KVCache",
    "Linear",
    "MultiHeadAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "Sampling",
    "SwiGLU",
    "Transformer",
    "TransformerBlock",
    "TransformerConfig",
    "from_llama",
    "generate",
    "head_cross_entropy",
    "llama_config",
    "load_llama",
    "load_weights",
    "preset",
    "stream",
]
