"""How much memory a training step takes, from its sizes alone, and whether the device has it.

With P parameters, M of them in matrices, n tokens in a micro-batch, and e bytes an activation of a matrix product (4;
2 under bfloat16 autocast), in bytes:

================  =============================================================================================
parameters        4 P
gradients         4 P
optimizer         8 P: AdamW's two averages
narrow weights    2 M under autocast, which keeps a narrow copy of each matrix until the backward pass is done; not of
                  the fused SwiGLU's
a block           n (4 e d_ff + a d_model + 2 e kv_width + 4 heads + 8), a = 32 in float32, 30 under autocast: what
                  autograd keeps of two norms, of q, k, v, of attention's output and log-sum-exp, and of SwiGLU;
                  a is 8 less where the norm's kernel keeps no normalised x, as CUDA's does;
                  the fused SwiGLU, CUDA's, keeps 2 e d_ff instead of 4, and under autocast a is 2 less
                  + n heads e length (1 for naive and compiled attention: its probabilities)
                  + length² - 4 n heads for naive attention: its mask is kept, and no log-sum-exp is
all blocks        layers · block; with recomputation of every k blocks, 4 n d_model · ⌈layers / k⌉ + k · block
loss              c vocab_size (8, or 10 under autocast): logits, what the softmax keeps of them, their gradient;
                  c is n, or the chunk if that is less
ends              12 n d_model + 4 n: the last norm (8 instead of 12 with such a kernel) and the targets
================  =============================================================================================

Where s processes have shards of B parameters in each block and R in embedding, head and last norm, each has of

================  =============================================================================================
parameters        4 P / s
gradients         4 P / s; 4 P where they accumulate, which they do whole
optimizer         8 P / s
narrow weights    2 vocab_size d_model under autocast: the head's; a block's arrive narrow
gathered          8 R + k e B + 8 B: R whole with its gradient, k blocks (2; all without resharding), and the
                  gradients of two on their way
================  =============================================================================================

Where c processes share each sequence, n is a c-th of the tokens, a block keeps n e d_model more, its probabilities are
n heads e length (2 c + 1) / 4 c, and gathered are the keys and values of one block with their gradients:
c n kv_width (4 e + 8).

What one process keeps is checked against the tensors that autograd keeps, counted, in tests. What compiled models keep
is less.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from ..profiling import available_bytes
from ..profiling.memory import GIB
from ..transformer import TransformerConfig

KEEPS_PROBABILITIES = ("naive", "compiled")


class DoesNotFitError(ValueError):
    """The device has less memory than a run is estimated to take."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the highest point of a training step, by what takes them."""

    parameters: int
    gradients: int
    optimizer: int
    narrow_weights: int
    blocks: int
    loss: int
    ends: int
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))

    def table(self) -> str:
        """A line for each part, and one for the whole, in GiB."""
        parts = {name.replace("_", " "): size for name, size in dataclasses.asdict(self).items()}
        return "\n".join(f"  {name:16}{size / GIB:9.3f} GiB" for name, size in (parts | {"total": self.total}).items())


def estimate_memory(
    model: TransformerConfig,
    micro_batch: int,
    *,
    autocast: bool,
    recompute_every: int | None = None,
    loss_chunk: int | None = None,
    shards: int = 1,
    context_size: int = 1,
    reshard: bool = True,
    accumulates: bool = False,
    fused_norm: bool = False,
    fused_ffn: bool = False,
) -> MemoryEstimate:
    """What a step with sequences of the full context length takes of each device; see the module for the formula.

    Args:
        model: its sizes; the parameters are in float32.
        micro_batch: sequences that go through it at a time.
        autocast: whether matrix products are in bfloat16.
        recompute_every: the model's ``checkpoint_every``.
        loss_chunk: tokens whose logits are in memory at a time; None for all.
        shards: processes that divide parameters, gradients and optimizer state among them.
        context_size: processes that share each sequence.
        reshard: whether a block's parameters are gathered anew for the backward pass.
        accumulates: whether a step has several micro-batches.
        fused_norm: whether the norm's kernel computes the normalised x again instead of keeping it, as CUDA's does;
            without it the estimate is the larger one.
        fused_ffn: whether SwiGLU is the one Function that it is on CUDA.
    """
    parameters = model.parameters()
    tokens, wide, narrow = micro_batch * model.context_length, 4, 2 if autocast else 4
    tokens = -(-tokens // context_size)
    block = tokens * (_block_bytes(model, narrow, context_size, fused_norm) - fused_ffn * _spared_bytes(model, narrow))
    if model.attn == "naive" and context_size == 1:
        block += model.context_length**2 - tokens * 4 * model.num_heads
    if recompute_every is None:
        blocks = model.num_layers * block
    else:
        groups = -(-model.num_layers // recompute_every)
        blocks = groups * tokens * wide * model.d_model + min(recompute_every, model.num_layers) * block
    with_logits = tokens if loss_chunk is None else min(loss_chunk, tokens)
    gathered = _gathered_parameters(model, narrow, reshard) if shards > 1 else 0
    if context_size > 1:
        gathered += context_size * tokens * model.kv_heads * model.d_head * (4 * narrow + 8)
    return MemoryEstimate(
        parameters=wide * parameters // shards,
        gradients=wide * parameters // (1 if accumulates else shards),
        optimizer=2 * wide * parameters // shards,
        narrow_weights=2 * _copied_parameters(model, shards, fused_ffn) if autocast else 0,
        blocks=blocks,
        loss=with_logits * model.vocab_size * (10 if autocast else 8),
        ends=tokens * ((8 if fused_norm else 12) * model.d_model + 4),
        gathered=gathered,
    )


def _copied_parameters(model: TransformerConfig, shards: int, fused_ffn: bool) -> int:
    """Those that autocast keeps narrow copies of. What is gathered of shards arrives narrow, but for the head."""
    head = model.vocab_size * model.d_model
    if shards > 1:
        return head
    gains = (2 * model.num_layers + 1) * model.d_model
    # A looked-up embedding is not multiplied with, so autocast makes no copy of it, unless it is the head too.
    looked_up = 0 if model.tie_embeddings else head
    ffn = model.num_layers * 3 * model.d_model * model.d_ff
    return model.parameters() - gains - looked_up - fused_ffn * ffn


def _block_bytes(model: TransformerConfig, narrow: int, context_size: int, fused_norm: bool) -> int:
    """What autograd keeps of a block for each token."""
    widths = 4 * narrow * model.d_ff + ((32 if narrow == 4 else 30) - 8 * fused_norm) * model.d_model
    widths += 2 * narrow * model.kv_heads * model.d_head + 4 * model.num_heads + 8
    keys = model.context_length
    if context_size > 1:
        widths += narrow * model.d_model  # the outputs of two chunks, and both in one
        keys = keys * (2 * context_size + 1) // (4 * context_size)
    if model.attn in KEEPS_PROBABILITIES:
        widths += model.num_heads * narrow * keys
    return widths


def _spared_bytes(model: TransformerConfig, narrow: int) -> int:
    """What the fused SwiGLU does not keep of it for each token: under autocast its input is cast once, not twice."""
    return 2 * narrow * model.d_ff + (narrow * model.d_model if narrow == 2 else 0)


def _gathered_parameters(model: TransformerConfig, narrow: int, reshard: bool) -> int:
    """Of sharded parameters, and their gradients, what is whole at a time."""
    root = (1 if model.tie_embeddings else 2) * model.vocab_size * model.d_model + model.d_model
    block = (model.parameters() - root) // model.num_layers
    at_a_time = min(2, model.num_layers) if reshard else model.num_layers
    return 8 * root + at_a_time * narrow * block + 8 * block


def require_memory(needed: MemoryEstimate, device: torch.device) -> None:
    """Raise DoesNotFitError where the device is known to have less memory than this, in words that help."""
    there = available_bytes(device)
    if there is not None and needed.total > there:
        raise DoesNotFitError(
            f"this run needs about {needed.total / GIB:.2f} GiB, and {device} has {there / GIB:.2f} GiB available:\n"
            f"{needed.table()}\n"
            "a smaller --micro-batch-size, --recompute-every 1 or --loss-chunk 4096 take less, and --parallel fsdp "
            "divides it; --force goes on anyway"
        )
