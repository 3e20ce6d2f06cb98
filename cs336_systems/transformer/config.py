"""The configuration of a Transformer: sizes and options, checked, counted, and saved as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..attention import Implementation
from ..files import write_text


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and options of a decoder-only `Transformer`.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        context_length: maximum length of a sequence, and number of positions of RoPE.
        d_model: width of the residual stream.
        d_ff: inner width of the feed-forward network, which has three matrices of d_model × d_ff.
        num_layers: number of blocks.
        num_heads: number of query heads; divides d_model into heads of an even width.
        num_kv_heads: number of key and value heads, each shared by a group of query heads (Ainslie et al., 2023);
            divides num_heads, and equals it if None.
        rope_theta: base of RoPE's wavelengths.
        window: number of tokens that a query attends to, itself included; None for all earlier ones.
        tie_embeddings: whether the output head uses the embedding's matrix.
        attn: the ``impl`` of `cs336_systems.attention.attention`.
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
        for name in ("vocab_size", "context_length", "d_ff", "num_layers"):
            check_size(name, getattr(self, name))
        check_heads(self.d_model, self.num_heads, self.kv_heads)
        if self.window is not None:
            check_size("window", self.window)
        check_positive("rope_theta", self.rope_theta)
        check_positive("norm_eps", self.norm_eps)
        if not isinstance(self.tie_embeddings, bool):
            raise TypeError(f"tie_embeddings must be a bool; got {self.tie_embeddings!r}")
        if isinstance(self.attn, Implementation):
            object.__setattr__(self, "attn", self.attn.value)
        names = ("auto", *(impl.value for impl in Implementation))
        if self.attn not in names:
            error = ValueError if isinstance(self.attn, str) else TypeError
            raise error(f"attn must be one of {', '.join(map(repr, names))}; got {self.attn!r}")

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def parameters(self) -> int:
        """Number of trainable parameters; a tied matrix counts once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        norms = (2 * self.num_layers + 1) * self.d_model
        return embeddings + self.num_layers * self._matrix_parameters_per_block() + norms

    def forward_flops_per_token(self, length: int | None = None, *, every_pair: bool = False) -> float:
        """Floating-point operations of the forward pass's matrix products, per token of a sequence of ``length``.

        Two for each weight of a matrix (the embedding, which is looked up, and the norms have none), and 4 d_head for
        each head and each pair of a query and a key, as FlashAttention's papers count. The causal mask leaves half of
        the pairs, a window a band of them; ``every_pair`` counts masked pairs too, as torch's ``FlopCounterMode`` does.
        ``length`` is the context length if None.

        Raises TypeError or ValueError if ``length`` is not a positive int.
        """
        length = self.context_length if length is None else length
        check_size("length", length)
        weights = self.num_layers * self._matrix_parameters_per_block() + self.vocab_size * self.d_model
        keys = length if self.window is None else min(self.window, length)
        # A window's band: a rectangle of length × keys without the triangle before the first key.
        pairs = length**2 if every_pair else length * keys - keys**2 / 2
        return 2.0 * weights + self.num_layers * 4.0 * self.d_model * pairs / length

    def training_flops_per_token(self, length: int | None = None) -> float:
        """Floating-point operations of a forward and a backward pass, per token of a sequence of ``length``.

        Three times the forward pass: each of its products has two in the backward pass. Recomputation, by checkpointed
        blocks or by FlashAttention, does not count. Divided by the device's peak rate this gives the model FLOPs
        utilisation of Chowdhery et al., "PaLM" (2022).

        Raises TypeError or ValueError if ``length``, the context length if None, is not a positive int.
        """
        return 3.0 * self.forward_flops_per_token(length)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the config as JSON, atomically: if writing fails, an earlier file stays as it was."""
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TransformerConfig:
        """Read a config that `save` wrote.

        Raises:
            ValueError: the file holds no JSON object, or its keys are not the attributes; the message names them.
            TypeError, ValueError: a value is invalid for its attribute.
        """
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object; got {type(values).__name__}")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown, missing = sorted(set(values) - set(names)), [name for name in names if name not in values]
        if unknown or missing:
            raise ValueError(f"{path} must have the keys {', '.join(names)}; got unknown {unknown}, missing {missing}")
        return cls(**values)

    def _matrix_parameters_per_block(self) -> int:
        heads = 2 * self.num_heads + 2 * self.kv_heads  # q and output; k and v
        return self.d_model * self.d_head * heads + 3 * self.d_model * self.d_ff


def check_size(name: str, size: object) -> None:
    """Raise TypeError unless ``size`` is an int, and ValueError unless it is positive."""
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{name} must be an int; got {size!r} of type {type(size).__name__}")
    if size < 1:
        raise ValueError(f"{name} must be at least 1; got {size}")


def check_positive(name: str, number: object) -> None:
    """Raise TypeError unless ``number`` is a float or an int, and ValueError unless it is positive and finite."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"{name} must be a float; got {number!r} of type {type(number).__name__}")
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be positive and finite; got {number}")


def check_heads(d_model: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise TypeError or ValueError unless all are sizes, heads divide the width evenly, and kv heads divide heads."""
    for name, size in {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}.items():
        check_size(name, size)
    if d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model, {d_model}; got {num_heads}")
    if d_model // num_heads % 2:
        raise ValueError(f"d_model / num_heads must be even, for RoPE; got {d_model} / {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}; got {num_kv_heads}")
