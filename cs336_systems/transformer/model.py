"""A decoder-only Transformer: pre-norm blocks of causal attention and SwiGLU, with RoPE and without biases.

Parameters have the names of the course's BasicsTransformerLM, so state dicts go both ways:
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
from torch.utils.checkpoint import checkpoint

from .attention import MultiHeadAttention
from .cache import KVCache, LayerCache, Step
from .config import TransformerConfig, check_size
from .layers import Embedding, Linear, Place, RMSNorm, RotaryEmbedding, SwiGLU, linear_std
from .loss import head_cross_entropy


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), and then x + ffn(norm(x)): the pre-norm block of Xiong et al. (2020).

    Args:
        config: its sizes.
        rope: rotates queries and keys; None for no positions. The blocks of a model share one.
        device, dtype: of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        rope: RotaryEmbedding | None = None,
        device: Place = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.ln1 = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        window = config.effective_window
        self.attn = MultiHeadAttention(
            config.d_model, config.num_heads, config.num_kv_heads, rope, window, config.attn, device, dtype
        )
        self.ln2 = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        self.ffn = SwiGLU(config.d_model, config.d_ff, device, dtype)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        positions: Int[Tensor, "#batch length"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """The residual stream after this block; arguments as for `MultiHeadAttention`."""
        x = x + self.attn(self.ln1(x), positions, cache)
        return x + self.ffn(self.ln2(x))


class Transformer(nn.Module):
    """A language model: from tokens to the logits of those that follow, or to their loss.

    >>> model = Transformer(preset("small"), device="cuda")
    >>> model.loss(token_ids[:, :-1], token_ids[:, 1:], chunk=4096).backward()

    Args:
        config: its sizes, and what computes attention.
        checkpoint_every: keep for the backward pass only what goes into every so many blocks, and compute the rest
            again (Chen et al., 2016); None to keep everything.
        device, dtype: of the weights. On the "meta" device they take no memory: ``to_empty`` and then
            `reset_parameters`, or ``load_state_dict``, make a model of it.

    Raises:
        TypeError, ValueError: ``checkpoint_every`` is not a positive int.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        checkpoint_every: int | None = None,
        device: Place = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if checkpoint_every is not None:
            check_size("checkpoint_every", checkpoint_every)
        self.config = config
        self.checkpoint_every = checkpoint_every
        # With the std of an embedding, which is 1, the logits of a tied head would have one of sqrt(d_model).
        std = linear_std(config.d_model, config.vocab_size) if config.tie_embeddings else 1.0
        rope = RotaryEmbedding(config.d_head, config.context_length, config.rope_theta, device, dtype)
        self.token_embeddings = Embedding(config.vocab_size, config.d_model, std, device, dtype)
        self.layers = nn.ModuleList(TransformerBlock(config, rope, device, dtype) for _ in range(config.num_layers))
        self.ln_final = RMSNorm(config.d_model, config.norm_eps, device, dtype)
        # No second parameter stands for a tied matrix: nothing that moves or shards parameters can untie it.
        self.lm_head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size, device, dtype)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, in the order in which a new model draws them."""
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
        """The logits of the token after each, or those asked for alone, or the loss.

        Args:
            token_ids: the tokens, each below ``vocab_size``.
            positions: for RoPE alone, each below ``context_length``; 0, 1, 2, ... if None. Which tokens a token sees
                follows from their order.
            cache: holds earlier tokens, after which these come; it is given their keys and values, and has then to be
                told by ``advance`` how many of them to keep. Positions follow from it. Under ``torch.no_grad`` alone.
                Or what its ``begin`` returned for these tokens, for functions that are compiled or recorded.
            logits_at: an index for each sequence: the logits (batch, vocab_size) of this token alone are computed.
            targets: what follows each token, -100 where that does not count: their mean cross-entropy is returned.
            chunk: how many tokens have logits in memory at a time while that is computed; None for all.
            count: what the sum over the targets is divided by; None for how many they are. See `head_cross_entropy`.

        Raises:
            ValueError: there are more tokens than the context length, arguments exclude one another, or a cache is to
                keep what needs gradients.
        """
        self._check(token_ids, positions, cache, logits_at, targets, {"chunk": chunk, "count": count})
        step = cache.begin(token_ids.shape[1], token_ids.device) if isinstance(cache, KVCache) else cache
        x = self.token_embeddings(token_ids)
        if step is not None:
            for number, block in enumerate(self.layers):
                x = block(x, step.positions, step.of_layer(number))
        elif self.checkpoint_every is not None and torch.is_grad_enabled():
            for first in range(0, len(self.layers), self.checkpoint_every):
                blocks = self.layers[first : first + self.checkpoint_every]
                # Nothing in a block is random, so there is no state of a generator to restore.
                x = checkpoint(_through, blocks, x, positions, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _through(self.layers, x, positions)
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

        It goes through ``__call__``, where compiled, sharded and hooked modules do their part. Of a wrapped model
        (DistributedDataParallel, torch.compile) call the wrapper, with ``targets``.
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
        of_loss: dict[str, float | None],
    ) -> None:
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids must have shape (batch, length); got {tuple(token_ids.shape)}")
        most = self.config.context_length
        if token_ids.shape[1] > most:
            raise ValueError(f"token_ids must have a length of at most {most}; got {token_ids.shape[1]}")
        batch = len(token_ids) if cache is None else cache.batch
        if batch != len(token_ids):
            raise ValueError(f"token_ids must have the batch of cache, {batch}; got {token_ids.shape[0]}")
        if cache is not None and cache.capacity > most:
            raise ValueError(f"cache must have a capacity of at most {most}; got {cache.capacity}")
        if cache is not None and positions is not None:
            raise ValueError("positions must be None with a cache, which gives them; got a tensor")
        if targets is not None and (cache is not None or logits_at is not None):
            name, other = ("logits_at", logits_at) if cache is None else ("cache", cache)
            raise ValueError(f"{name} must be None with targets; got {type(other).__name__}")
        for name, value in of_loss.items():
            if value is not None and targets is None:
                raise ValueError(f"{name} must be None without targets; got {value}")


def reset_parameters(part: nn.Module) -> None:
    """Draw the parameters of a part of a model anew."""
    for module in part.modules():
        if isinstance(module, (Linear, Embedding, RMSNorm, RotaryEmbedding)):
            module.reset_parameters()


def _through(blocks: Iterable[nn.Module], x: Tensor, positions: Tensor | None) -> Tensor:
    for block in blocks:
        x = block(x, positions)
    return x
