"""A decoder-only Transformer: pre-norm blocks of causal attention and SwiGLU, with RoPE and without biases.

Parameters have the names of the course's BasicsTransformerLM, so state dicts can be loaded in both directions:
``token_embeddings.weight``, ``layers.0.ln1.weight``, ``layers.0.attn.q_proj.weight`` (``k_proj``, ``v_proj``,
``output_proj``), ``layers.0.ln2.weight``, ``layers.0.ffn.w1.weight`` (``w2``, ``w3``), ``ln_final.weight`` and
``lm_head.weight``, which a model with tied embeddings does not have.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.types import Device
from torch.utils.checkpoint import checkpoint

from .attention import MultiHeadAttention
from .cache import KVCache, Step
from .config import TransformerConfig, check_size
from .layers import Embedding, Linear, RMSNorm, RotaryEmbedding, SwiGLU, linear_std
from .loss import head_cross_entropy


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)): the pre-norm block of Xiong et al. (2020).

    Args:
        config: sizes and options.
        rope: rotates queries and keys; the blocks of a model share it. None for no position embedding.
        device, dtype: of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rope: RotaryEmbedding | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        whole = config.window is None or config.window >= config.context_length
        window = None if whole else config.window
        self.attn = MultiHeadAttention(
            config.d_model, config.num_heads, config.num_kv_heads, rope, window, config.attn, device, dtype
        )
        self.ln2 = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        self.ffn = SwiGLU(config.d_model, config.d_ff, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "#batch length"] | None = None,
        cache: Step | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """The residual stream after this block; arguments as for `MultiHeadAttention`."""
        x = x + self.attn(self.ln1(x), positions, cache)
        return x + self.ffn(self.ln2(x))


class Transformer(nn.Module):
    """A language model: maps tokens to the logits of the next tokens, or to their loss.

    >>> model = Transformer(preset("small"), device="cuda")
    >>> model.loss(token_ids[:, :-1], token_ids[:, 1:], chunk=4096).backward()

    Args:
        config: sizes and options.
        checkpoint_every: activation checkpointing (Chen et al., 2016): save only the input of every group of this many
            blocks, and recompute the group in the backward pass; None to save everything.
        device, dtype: of the weights. On the "meta" device they take no memory; call ``to_empty`` and then
            `reset_parameters` or ``load_state_dict``.

    Raises TypeError or ValueError if ``checkpoint_every`` is not a positive int.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        checkpoint_every: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if checkpoint_every is not None:
            check_size("checkpoint_every", checkpoint_every)
        self.config = config
        self.checkpoint_every = checkpoint_every
        # An embedding's std of 1 would give the logits of a tied head a std of sqrt(d_model).
        std = linear_std(config.d_model, config.vocab_size) if config.tie_embeddings else 1.0
        rope = RotaryEmbedding(config.d_head, config.context_length, config.rope_theta, device, dtype)
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, std, device, dtype)
        self.layers = nn.ModuleList(TransformerBlock(config, rope, device, dtype) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        # A tied head has no parameter, so moving or sharding parameters cannot untie it.
        self.lm_head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, device, dtype)

    def reset_parameters(self) -> None:
        """Initialise all parameters, with the same random numbers as a new model."""
        reset_parameters(self)

    def forward(
        self,
        token_ids: Int[Tensor, "batch length"],
        positions: Int[Tensor, "#batch length"] | None = None,
        cache: KVCache | Step | None = None,
        *,
        logits_at: Int[Tensor, " batch"] | None = None,
        targets: Int[Tensor, "batch length"] | None = None,
        chunk: int | None = None,
        count: float | None = None,
    ) -> Float[Tensor, "batch length vocab_size"] | Float[Tensor, "batch vocab_size"] | Float[Tensor, ""]:
        """The logits of the next token at every position, or at one per sequence, or the loss.

        Args:
            token_ids: tokens below ``vocab_size``.
            positions: below ``context_length``, for RoPE only; 0, 1, 2, ... if None. The causal mask follows the order
                of the tokens.
            cache: holds the earlier tokens of each sequence and stores these after them; positions follow from it.
                Call its ``advance`` afterwards. Requires ``torch.no_grad``. Functions to compile or to capture in a
                CUDA graph pass a `Step` instead, the result of ``cache.begin`` for these tokens.
            logits_at: one index per sequence: compute only this position's logits, (batch, vocab_size).
            targets: the next token at every position, or -100 to ignore one: return the mean cross-entropy.
            chunk: number of tokens whose logits are in memory at a time for the loss; None for all.
            count: divisor of the loss; None for the number of targets. See `head_cross_entropy`.

        Raises ValueError if there are more tokens than the context length, arguments exclude one another, or keys to
        cache require gradients.
        """
        self._check(token_ids, positions, cache, logits_at, targets, chunk, count)
        step = cache.begin(token_ids.shape[1], token_ids.device) if isinstance(cache, KVCache) else cache
        x = self.token_embeddings(token_ids)
        if step is not None:
            for layer, block in enumerate(self.layers):
                x = block(x, step.positions, step._replace(layer=layer))
        elif self.checkpoint_every is not None and torch.is_grad_enabled():
            for first in range(0, len(self.layers), self.checkpoint_every):
                blocks = self.layers[first : first + self.checkpoint_every]
                # Blocks draw no random numbers, so there is no generator state to restore.
                x = checkpoint(_run_blocks, blocks, x, positions, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _run_blocks(self.layers, x, positions)
        if targets is not None:
            return head_cross_entropy(self._head, self.ln_final(x), targets, chunk, count)
        if logits_at is not None:
            x = x[torch.arange(len(x), device=x.device), logits_at]
        return self._head(self.ln_final(x))

    def loss(
        self,
        token_ids: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"],
        *,
        positions: Int[Tensor, "#batch length"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """The mean cross-entropy of ``targets``; see `forward`, which computes it.

        Goes through ``__call__``, so hooks, FSDP and compilation of this module apply. A wrapper of the model, as
        DistributedDataParallel and torch.compile return, is to be called itself, with ``targets``.
        """
        return self(token_ids, positions, targets=targets, chunk=chunk)

    def _head(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch vocab_size"]:
        return F.linear(x, self.token_embeddings.weight) if self.lm_head is None else self.lm_head(x)

    def _check(
        self,
        token_ids: Tensor,
        positions: Tensor | None,
        cache: KVCache | Step | None,
        logits_at: Tensor | None,
        targets: Tensor | None,
        chunk: int | None,
        count: float | None,
    ) -> None:
        limit = self.config.context_length
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids must have shape (batch, length); got {tuple(token_ids.shape)}")
        if token_ids.shape[1] > limit:
            raise ValueError(f"token_ids must have a length of at most {limit}; got {token_ids.shape[1]}")
        if cache is not None and cache.batch != len(token_ids):
            raise ValueError(f"token_ids must have the batch of cache, {cache.batch}; got {token_ids.shape[0]}")
        if cache is not None and cache.capacity > limit:
            raise ValueError(f"cache must have a capacity of at most {limit}; got {cache.capacity}")
        for name, value, excluded, where in (
            ("positions", positions, cache is not None, "with a cache"),
            ("cache", cache, targets is not None, "with targets"),
            ("logits_at", logits_at, targets is not None, "with targets"),
            ("chunk", chunk, targets is None, "without targets"),
            ("count", count, targets is None, "without targets"),
        ):
            if excluded and value is not None:
                got = value if isinstance(value, (int, float)) else type(value).__name__
                raise ValueError(f"{name} must be None {where}; got {got}")


def reset_parameters(module: nn.Module) -> None:
    """Initialise the parameters of all layers in a module."""
    for layer in module.modules():
        if isinstance(layer, (Linear, Embedding, RMSNorm, RotaryEmbedding)):
            layer.reset_parameters()


def _run_blocks(blocks: Iterable[nn.Module], x: Tensor, positions: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, positions)
    return x
