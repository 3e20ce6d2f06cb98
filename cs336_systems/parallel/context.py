"""Attention over sequences that several processes share: keys and values are gathered, queries stay where they are.

Every process has two chunks of each sequence (see `zigzag`). For each layer all of them gather the keys and values of
the whole sequences, as in Llama 3 (2024), and call `attention` twice, for the queries of each chunk with the keys up to
its end: aligned at the bottom right, causal masks and windows are then those of the whole sequence. Ring Attention (Liu
et al., 2023) sends them on from process to process instead, which hides the sending behind the computation and never
has all keys in one place, but needs results of parts to be merged; with grouped heads keys and values are few, and any
implementation of attention computes this call as it is.
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
from .zigzag import chunks_of, owners

# Both have other names from torch 2.13 on, where the older ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Sharers:
    """The processes that share a sequence, and which of them this one is."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def chunks_seen(self) -> tuple[int, int]:
        """How many chunks the queries of this process's early chunk see, and those of its late one."""
        early, late = chunks_of(self.rank, self.size)
        return early + 1, late + 1

    def gather(
        self, mine: Float[Tensor, "batch heads share d"], into: Float[Tensor, "batch heads seen d"] | None = None
    ) -> Float[Tensor, "batch heads seen d"]:
        """The keys, or values, of a sequence in order, from its beginning to the end of this process's late chunk.

        Args:
            mine: this process's.
            into: where they are written; a tensor of their own if None.
        """
        sent = rearrange(mine, "batch heads (two chunk) d -> two batch heads chunk d", two=2).contiguous()
        received = sent.new_empty(2 * self.size, *sent.shape[1:])
        _all_gather(received, sent, group=self.group)
        place = {number: index for index, number in enumerate(owners(self.size))}
        in_order = [received[place[number]] for number in range(self.chunks_seen[1])]
        out = None if into is None else into.unflatten(2, (len(in_order), -1))
        return torch.stack(in_order, dim=2, out=out).flatten(2, 3)

    def sum_back(
        self, *gradients: Float[Tensor, "batch heads _ d"] | None
    ) -> Float[Tensor, "batch heads share d"] | None:
        """The gradient of what this process gave to `gather`, from those that all processes have: in float32.

        Args:
            gradients: of the first keys or values, as many whole chunks as each has. None where there is none, as on
                all other processes.
        """
        there = [gradient for gradient in gradients if gradient is not None]
        if not there:
            return None
        batch, heads, _, d = there[0].shape
        chunk = there[-1].shape[2] // self.chunks_seen[1]
        wide = torch.promote_types(there[0].dtype, torch.float32)
        sent = there[0].new_empty(2 * self.size, batch, heads, chunk, d, dtype=wide)
        for number, place in zip(owners(self.size), sent, strict=True):
            seen = [x[:, :, number * chunk : (number + 1) * chunk] for x in there if number * chunk < x.shape[2]]
            # The first is copied: to be added to, zeros would have to be written and read besides.
            place.copy_(seen[0]) if seen else place.zero_()
            for gradient in seen[1:]:
                place += gradient
        received = sent.new_empty(2, *sent.shape[1:])
        _reduce_scatter(received, sent, group=self.group)
        return rearrange(received, "two batch heads chunk d -> batch heads (two chunk) d")


class _Gather(torch.autograd.Function):
    """Local keys and values to those that the early chunk's queries see, and those that the late one's see.

    The first are a view of the second, given out by themselves so that the gradients of both come here, and are added
    in float32 with those of the other processes.
    """

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, sharers: Sharers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.sharers, ctx.dtypes = sharers, (k.dtype, v.dtype)
        ctx.set_materialize_grads(False)
        keys, values = sharers.gather(k), sharers.gather(v)
        early = k.shape[2] // 2 * sharers.chunks_seen[0]
        return keys[:, :, :early], values[:, :, :early], keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        early_k, early_v, late_k, late_v = gradients
        both = ctx.sharers.sum_back(early_k, late_k), ctx.sharers.sum_back(early_v, late_v)
        dk, dv = (None if x is None else x.to(dtype) for x, dtype in zip(both, ctx.dtypes, strict=True))
        return dk, dv, None


class _Release(torch.autograd.Function):
    """Attention's output as it is; the memory of the gathered keys and values is given back until the backward pass.

    Autograd keeps them for the backward of attention, in every layer at once, and this must not be: it is the memory
    that sharing a sequence is to save. So they are emptied here, where attention has used them, and filled again, by
    gathering anew, when the output's gradient arrives, which is before attention's backward can begin. FSDP does the
    same with parameters.

    The other two ways are worse. An autograd Function around all of attention would have to compute it once more in the
    backward pass, because what an implementation keeps for its own is its own affair. Saved-tensor hooks around it
    would take the place of activation checkpointing's, for autograd asks the innermost alone: queries, outputs and
    log-sum-exps of every layer would stay, which checkpointing is to drop. Here all that is kept goes through
    ``save_for_backward``, also the tensors to be filled, so that after a recomputation those are filled that it made.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor, sharers: Sharers) -> Tensor:
        ctx.sharers = sharers
        ctx.save_for_backward(keys, values, k, v)
        for gathered in (keys, values):
            gathered.untyped_storage().resize_(0)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        keys, values, k, v = ctx.saved_tensors
        for gathered, mine in ((keys, k), (values, v)):
            storage = gathered.untyped_storage()
            if storage.size() == 0:  # else a backward pass that keeps the graph was here before
                storage.resize_(gathered.numel() * gathered.element_size())
                # `data` has a version of its own: for autograd these are the values that it has kept.
                ctx.sharers.gather(mine, into=gathered.data)
        return dout, None, None, None, None, None


class ContextAttention(nn.Module):
    """Causal self-attention of sequences that the processes of a group share, cut as `zigzag.share_of` does it.

    >>> attend = ContextAttention(Attention(causal=True), group)
    >>> out = attend(q, k, v)  # of this process's queries, over the keys of all

    Args:
        whole: computes it; its implementation, window, scale and soft-cap are kept.
        group: the processes; each calls this the same number of times.

    Raises:
        ValueError: ``whole`` is not causal, or drops weights, which it would do by other numbers of rows.
    """

    def __init__(self, whole: Attention, group: dist.ProcessGroup) -> None:
        super().__init__()
        if whole.causal not in (True, "bottom_right"):
            raise ValueError(f"whole must be causal, aligned at the bottom right; got causal={whole.causal!r}")
        if whole.dropout_p:
            raise ValueError(f"whole must have a dropout_p of 0; got {whole.dropout_p}")
        self.whole = whole
        self.sharers = Sharers(group, dist.get_rank(group), dist.get_world_size(group))

    # What is traced knows no collective in the middle of autograd, nor memory that goes and comes back.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        q: Float[Tensor, "batch q_heads share d"],
        k: Float[Tensor, "batch kv_heads share d"],
        v: Float[Tensor, "batch kv_heads share dv"],
    ) -> Float[Tensor, "batch q_heads share dv"]:
        """The output for this process's queries: the early chunk's, then the late one's.

        Gradients of k and v are summed over the processes in float32, so that they are those of the whole sequence.

        Raises:
            ValueError: the length is odd, so that it is not two chunks.
        """
        if q.shape[2] % 2:
            raise ValueError(f"q must have an even length, two chunks of a sequence; got {q.shape[2]}")
        q, k, v = autocast_inputs(q, k, v)  # before they are sent: half the bytes
        early_k, early_v, keys, values = _Gather.apply(k, v, self.sharers)
        early_q, late_q = q.chunk(2, dim=2)
        out = torch.cat([self.whole(early_q, early_k, early_v), self.whole(late_q, keys, values)], dim=2)
        if not out.requires_grad:
            return out
        return _Release.apply(out, keys, values, k, v, self.sharers)


def share_context(model: Transformer, group: dist.ProcessGroup) -> None:
    """Let the processes of a group share each sequence of a model: its layers get `ContextAttention`."""
    for layer in _layers(model):
        layer.attend = ContextAttention(layer.attend, group)


@contextlib.contextmanager
def whole_sequences(model: Transformer) -> Iterator[None]:
    """Until the block ends, the model takes whole sequences: with a cache of keys there is nothing to share."""
    shared = {layer: layer.attend for layer in _layers(model) if isinstance(layer.attend, ContextAttention)}
    for layer, attend in shared.items():
        layer.attend = attend.whole
    try:
        yield
    finally:
        for layer, attend in shared.items():
            layer.attend = attend


def _layers(model: Transformer) -> list[Any]:
    """Those of attention, whose ``attend`` is replaced here by what is called alike."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
