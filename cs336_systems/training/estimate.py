"""How much memory a training step takes, from its sizes alone, and whether the device has it.

With P parameters, M of them in matrices, n tokens in a micro-batch, and e bytes an activation of a matrix product (4;
2 under bfloat16 autocast), in bytes:

================  =============================================================================================
parameters        4 P
gradients         4 P
optimizer         8 P: AdamW's two averages
narrow weights    2 M under autocast, which keeps a narrow copy of each matrix until the backward pass is done
a block           n (4 e d_ff + a d_model + 2 e kv_width + 4 heads + 8), a = 36 in float32, 32 under autocast: what
                  autograd keeps of two norms, of q, k, v, of attention's output and log-sum-exp, and of SwiGLU
                  + n heads e length (1 for naive and compiled attention: its probabilities)
all blocks        layers · block; with recomputation of every k blocks, 4 n d_model · ⌈layers / k⌉ + k · block
loss              c vocab_size (8, or 10 under autocast): logits, what the softmax keeps of them, their gradient;
                  c is n, or the chunk if that is less
ends              12 n d_model + 4 n: the last norm and the targets
================  =============================================================================================

It is checked against the tensors that autograd keeps, counted, in tests. What compiled models keep is less.
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
) -> MemoryEstimate:
    """What a step with sequences of the full context length takes; see the module for the formula.

    Args:
        model: its sizes; the parameters are in float32.
        micro_batch: sequences that go through it at a time.
        autocast: whether matrix products are in bfloat16.
        recompute_every: the model's ``checkpoint_every``.
        loss_chunk: tokens whose logits are in memory at a time; None for all.
    """
    parameters = model.parameters()
    tokens, wide, narrow = micro_batch * model.context_length, 4, 2 if autocast else 4
    gains = (2 * model.num_layers + 1) * model.d_model
    # A looked-up embedding is not multiplied with, so autocast makes no copy of it, unless it is the head too.
    looked_up = 0 if model.tie_embeddings else model.vocab_size * model.d_model
    block = tokens * _block_bytes(model, narrow)
    if recompute_every is None:
        blocks = model.num_layers * block
    else:
        groups = -(-model.num_layers // recompute_every)
        blocks = groups * tokens * wide * model.d_model + min(recompute_every, model.num_layers) * block
    with_logits = tokens if loss_chunk is None else min(loss_chunk, tokens)
    return MemoryEstimate(
        parameters=wide * parameters,
        gradients=wide * parameters,
        optimizer=2 * wide * parameters,
        narrow_weights=2 * (parameters - gains - looked_up) if autocast else 0,
        blocks=blocks,
        loss=with_logits * model.vocab_size * (10 if autocast else 8),
        ends=tokens * (12 * model.d_model + 4),
    )


def _block_bytes(model: TransformerConfig, narrow: int) -> int:
    """What autograd keeps of a block for each token."""
    widths = 4 * narrow * model.d_ff + (36 if narrow == 4 else 32) * model.d_model
    widths += 2 * narrow * model.kv_heads * model.d_head + 4 * model.num_heads + 8
    if model.attn in KEEPS_PROBABILITIES:
        widths += model.num_heads * narrow * model.context_length
    return widths


def require_memory(needed: MemoryEstimate, device: torch.device) -> None:
    """Raise DoesNotFitError where the device is known to have less memory than this, in words that help."""
    there = available_bytes(device)
    if there is not None and needed.total > there:
        raise DoesNotFitError(
            f"this run needs about {needed.total / GIB:.2f} GiB, and {device} has {there / GIB:.2f} GiB available:\n"
            f"{needed.table()}\n"
            "a smaller --micro-batch-size, --recompute-every 1 or --loss-chunk 4096 take less; --force goes on anyway"
        )
