"""What a Transformer is: its sizes, in a frozen value that is checked, counted, and kept as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention import Implementation
from ..attention.dispatch import NAMES
from ..files import write_text
from ..profiling.flops import attention_flops


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes and settings of a decoder-only Transformer, as `Transformer` builds it.

    Attributes:
        vocab_size: how many tokens there are.
        context_length: the longest sequence; RoPE has angles for so many positions.
        d_model: the width of the residual stream.
        d_ff: the inner width of the feed-forward network, which has three matrices of d_model × d_ff.
        num_layers: how many blocks.
        num_heads: of queries; divides d_model, into heads of an even width.
        num_kv_heads: of keys and values, each of which serves a group of query heads (Ainslie et al., 2023); divides
            num_heads. None for as many as num_heads.
        rope_theta: the base of the wavelengths of RoPE.
        window: how many tokens a query sees, its own among them; None for all before it.
        tie_embeddings: whether the head's matrix is that of the embedding.
        attn: what computes attention, an ``impl`` of `cs336_systems.attention.attention`.
        norm_eps: what RMSNorm adds to the mean square.

    Raises:
        TypeError: an attribute has the wrong type.
        ValueError: a size is not positive, sizes do not divide one another, or ``attn`` names no implementation.
    """

    vocab_size: int
    context_length: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    rope_theta: float = 10_000.0
    window: int | None = None
    tie_embeddings: bool = False
    attn: str = "auto"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "d_model", "d_ff", "num_layers", "num_heads"):
            check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "window"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            check_positive(name, getattr(self, name))
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be a bool; got {self.tie_embeddings!r}")
        if isinstance(self.attn, Implementation):
            object.__setattr__(self, "attn", self.attn.value)
        if not isinstance(self.attn, str):
            raise TypeError(f"attn must be one of {', '.join(map(repr, NAMES))}; got {self.attn!r}")
        if self.attn not in NAMES:
            raise ValueError(f"attn must be one of {', '.join(map(repr, NAMES))}; got {self.attn!r}")
        check_heads(self.d_model, self.num_heads, self.kv_heads)

    @property
    def d_head(self) -> int:
        """The width of a head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """How many heads keys and values have."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def effective_window(self) -> int | None:
        """The window; None where it is at least as long as the context, and hides nothing."""
        return None if self.window is None or self.window >= self.context_length else self.window

    def parameters(self) -> int:
        """How many numbers are trained, exactly; a tied matrix counts once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        gains = (2 * self.num_layers + 1) * self.d_model
        return embeddings + self.num_layers * self._weights_of_a_block() + gains

    def forward_flops_per_token(self, length: int | None = None, *, every_pair: bool = False) -> float:
        """Operations of a forward pass for each token of sequences of ``length``: those of its matrix products.

        Two for each weight that a token is multiplied with (all but the gains of norms and the embedding, which is
        looked up), and those of attention, as `cs336_systems.profiling.flops` counts them, over the pairs that the
        causal mask and the window leave, or with ``every_pair`` over those of all queries and keys: so torch's
        ``FlopCounterMode`` counts where every score is computed.

        Raises:
            TypeError, ValueError: ``length``, the context length if None, is not a positive int.
        """
        length = self.context_length if length is None else length
        check_size("length", length)
        weights = self.num_layers * self._weights_of_a_block() + self.vocab_size * self.d_model
        if every_pair:
            pairs = attention_flops(1, self.num_heads, length, length, self.d_head)
        else:
            seen = length if self.window is None else min(self.window, length)
            # The band of a window is a rectangle of length × seen pairs less the corner of queries that begin before
            # it.
            rectangle = attention_flops(1, self.num_heads, length, seen, self.d_head)
            pairs = rectangle - attention_flops(1, self.num_heads, seen, seen, self.d_head, causal=True)
        return 2.0 * weights + self.num_layers * pairs / length

    def training_flops_per_token(self, length: int | None = None) -> float:
        """Operations of a forward and a backward pass that the model needs for each token of sequences of ``length``.

        Three times those of the forward pass, over the pairs that the causal mask and the window leave: every product
        has two in the backward pass. What is computed a second time, in checkpointed blocks or in the backward pass of
        FlashAttention, does not count: divided by the device's peak rate, this gives the model FLOPs utilisation of
        Chowdhery et al., "PaLM" (2022).

        Raises:
            TypeError, ValueError: ``length``, the context length if None, is not a positive int.
        """
        return 3.0 * self.forward_flops_per_token(length)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config as JSON. The file is there whole or, if writing fails, as it was before."""
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TransformerConfig:
        """The config that `save` wrote.

        Raises:
            ValueError: the file is no JSON object, or has other keys than the attributes; the message names them.
            TypeError, ValueError: a value is not what its attribute has to be.
        """
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object; got {type(values).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown, missing = sorted(set(values) - set(names)), [name for name in names if name not in values]
        if unknown or missing:
            raise ValueError(
                f"{path} must have the keys {', '.join(names)}; got unknown {unknown or 'none'}, missing "
                f"{missing or 'none'}"
            )
        return cls(**values)

    def _weights_of_a_block(self) -> int:
        heads = 2 * self.num_heads + 2 * self.kv_heads  # of q and output, of k and v
        return self.d_model * self.d_head * heads + 3 * self.d_model * self.d_ff


def check_size(name: str, size: object) -> None:
    """Raise TypeError unless ``size`` is an int, ValueError unless it is positive."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int; got {size!r} of type {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1; got {size}")


def check_positive(name: str, number: object) -> None:
    """Raise TypeError unless ``number`` is a float or an int, ValueError unless it is positive and finite."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{name} must be a float; got {number!r} of type {type(number).__name__}")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be positive and finite; got {number}")


def check_heads(d_model: int, num_heads: int, kv_heads: int) -> None:
    """Raise ValueError unless heads divide the width, evenly for RoPE's pairs, and one another."""
    if d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, {d_model}; got {num_heads}")
    if d_model // num_heads % 2:
        raise ValueError(f"d_model / num_heads must be even, for RoPE; got {d_model} / {num_heads}")
    if num_heads % kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}; got {kv_heads}")
