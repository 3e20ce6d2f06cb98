"""Context parallelism: keys and values are all-gathered, queries stay local.

Each process has two chunks of every sequence (see `zigzag`). For each layer the keys and values of the full sequences
are gathered, as in Llama 3 (2024), and `attention` is called for the queries of each chunk with the keys up to its end:
aligned at the bottom right, causal masks and windows are those of the full sequence. Ring Attention (Liu et al., 2023)
overlaps communication with computation and never holds all keys, but has to merge partial results. With grouped-query
attention keys and values are small, and any implementation of attention works unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..attention import Attention
from ..attention.precision import autocast_inputs
from ..transformer import MultiHeadAttention, Transformer
from .zigzag import chunks_of, gathered_order

# torch 2.13 renames both, and warns of the older names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share a sequence, and the rank of this one."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def chunks_of_keys(self) -> tuple[int, int]:
        """Number of chunks that the queries of the early chunk attend to, and those of the late one."""
        early, late = chunks_of(self.rank, self.size)
        return early + 1, late + 1

    def all_gather(
        self, local: Float[Tensor, "batch heads shard d"], out: Float[Tensor, "batch heads keys d"] | None = None
    ) -> Float[Tensor, "batch heads keys d"]:
        """The keys or values of the sequences in order, from the first to the end of this process's late chunk."""
        sent = rearrange(local, "batch heads (two chunk) d -> two batch heads chunk d", two=2).contiguous()
        received = sent.new_empty(2 * self.size, *sent.shape[1:])
        _all_gather(received, sent, group=self.group)
        index_of = {chunk: index for index, chunk in enumerate(gathered_order(self.size))}
        in_order = [received[index_of[chunk]] for chunk in range(self.chunks_of_keys[1])]
        out = None if out is None else out.unflatten(2, (len(in_order), -1))
        return torch.stack(in_order, dim=2, out=out).flatten(2, 3)

    def reduce_scatter(
        self, *gradients: Float[Tensor, "batch heads _ d"] | None
    ) -> Float[Tensor, "batch heads shard d"] | None:
        """The gradient of the argument of `all_gather`: gradients of all processes are summed in float32.

        Args:
            gradients: of the first chunks of keys or values; all None on every process if none is needed.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        batch, heads, _, d = present[0].shape
        chunk = present[-1].shape[2] // self.chunks_of_keys[1]
        dtype = torch.promote_types(present[0].dtype, torch.float32)
        sent = present[0].new_empty(2 * self.size, batch, heads, chunk, d, dtype=dtype)
        for index, total in zip(gathered_order(self.size), sent, strict=True):
            terms = [x[:, :, index * chunk : (index + 1) * chunk] for x in present if index * chunk < x.shape[2]]
            # The first term is copied: adding it to zeros would write and read them as well.
            total.copy_(terms[0]) if terms else total.zero_()
            for term in terms[1:]:
                total += term
        received = sent.new_empty(2, *sent.shape[1:])
        _reduce_scatter(received, sent, group=self.group)
        return rearrange(received, "two batch heads chunk d -> batch heads (two chunk) d")


class _GatherKeys(torch.autograd.Function):
    """Local keys and values to those for the early chunk's queries, and those for the late chunk's.

    The first are views of the second. They are separate outputs, so that both gradients arrive here and are summed in
    float32 with those of the other processes.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, group: ContextGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.group, ctx.dtypes = group, (k.dtype, v.dtype)
        ctx.set_materialize_grads(False)
        keys, values = group.all_gather(k), group.all_gather(v)
        early = k.shape[2] // 2 * group.chunks_of_keys[0]
        return keys[:, :, :early], values[:, :, :early], keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        early_k, early_v, late_k, late_v = gradients
        both = ctx.group.reduce_scatter(early_k, late_k), ctx.group.reduce_scatter(early_v, late_v)
        dk, dv = (None if x is None else x.to(dtype) for x, dtype in zip(both, ctx.dtypes, strict=True))
        return dk, dv, None


class _FreeGathered(torch.autograd.Function):
    """The identity of attention's output. Frees the gathered keys and values until the backward pass.

    Autograd saves them for attention's backward, in all layers at once: the memory that context parallelism is to save.
    So their storage is emptied here, after attention has used it, and gathered again when the output's gradient
    arrives, before attention's backward begins. FSDP does the same with parameters.

    Alternatives: an autograd Function around attention would have to recompute it, because what an implementation saves
    is private. Saved-tensor hooks would replace those of activation checkpointing, because autograd uses the innermost
    alone. Here everything goes through ``save_for_backward``, so that after a recomputation its tensors are filled.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, group: ContextGroup
    ) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(keys, values, k, v)
        for gathered in (keys, values):
            gathered.untyped_storage().resize_(0)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        keys, values, k, v = ctx.saved_tensors
        for gathered, local in ((keys, k), (values, v)):
            storage = gathered.untyped_storage()
            if storage.size() == 0:  # not after an earlier backward with retain_graph
                storage.resize_(gathered.numel() * gathered.element_size())
                # `data` has its own version counter: autograd does not see a modified saved tensor.
                ctx.group.all_gather(local, out=gathered.data)
        return dout, None, None, None, None, None


class ContextAttention(nn.Module):
    """Causal self-attention over sequences that are divided among processes as by `zigzag.zigzag_shard`.

    >>> attend = ContextAttention(Attention(causal=True), group)
    >>> out = attend(q, k, v)  # for local queries, over the keys of all processes

    Args:
        attention: its implementation, window, scale and softcap are used.
        group: the processes; each calls this the same number of times.

    Raises ValueError if ``attention`` is not causal, or has dropout, which depends on the indices of rows.
    """

    def __init__(self, attention: Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        if attention.causal not in (True, "bottom_right"):
            raise ValueError(f"attention must be causal, aligned at the bottom right; got causal={attention.causal!r}")
        if attention.dropout_p:
            raise ValueError(f"attention must have a dropout_p of 0; got {attention.dropout_p}")
        self.attention = attention
        self.group = ContextGroup(group, dist.get_rank(group), dist.get_world_size(group))

    # The compiler traces neither collectives within autograd nor storage that is resized.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        q: Float[Tensor, "batch q_heads shard d"],
        k: Float[Tensor, "batch kv_heads shard d"],
        v: Float[Tensor, "batch kv_heads shard dv"],
    ) -> Float[Tensor, "batch q_heads shard dv"]:
        """The output for the local queries: the early chunk's, then the late one's.

        Gradients of k and v are summed over the processes in float32: they are those of the full sequences.

        Raises ValueError if the length is odd, so that it is not two chunks.
        """
        if q.shape[2] % 2:
            raise ValueError(f"q must have an even length, two chunks of a sequence; got {q.shape[2]}")
        q, k, v = autocast_inputs(q, k, v)  # before communication: half the bytes
        early_k, early_v, keys, values = _GatherKeys.apply(k, v, self.group)
        early_q, late_q = q.chunk(2, dim=2)
        out = torch.cat([self.attention(early_q, early_k, early_v), self.attention(late_q, keys, values)], dim=2)
        if not out.requires_grad:
            return out
        return _FreeGathered.apply(out, keys, values, k, v, self.group)


def share_context(model: Transformer, group: dist.ProcessGroup) -> None:
    """Divide the sequences of a model among the processes of a group: its layers get `ContextAttention`."""
    for layer in _attention_layers(model):
        layer.attend = ContextAttention(layer.attend, group)


@contextlib.contextmanager
def whole_sequences(model: Transformer) -> Iterator[None]:
    """Within the block, each process computes full sequences alone: a KV cache is not divided."""
    shared = {layer: layer.attend for layer in _attention_layers(model) if isinstance(layer.attend, ContextAttention)}
    for layer, attend in shared.items():
        layer.attend = attend.attention
    try:
        yield
    finally:
        for layer, attend in shared.items():
            layer.attend = attend


def _attention_layers(model: Transformer) -> list[Any]:
    """The attention layers; Any, because their ``attend`` is replaced by another module."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
