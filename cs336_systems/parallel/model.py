"""One model that the processes of a layout train together: as copies, in shards, over parts of sequences."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.types import Device

from ..transformer import Transformer
from ..transformer.model import reset_parameters
from .context import share_context, whole_sequences
from .layout import WITH_SHARDS, Layout
from .zigzag import share_of

# The only buffer, RoPE's table, is the same everywhere from the beginning. torch 2.13 has another name for this.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class ParallelModel:
    """A model, and how the processes of a layout compute its loss and gradients: one process's, but for rounding.

    Processes that have copies add up their gradients (DistributedDataParallel); otherwise each has a part of every
    parameter (FSDP2, after Rajbhandari et al., "ZeRO", 2020): a block's parameters are gathered before it computes, and
    its gradients added up and divided among the processes after it. In both cases over all processes, whether they have
    other sequences or other parts of the same ones.

    Args:
        make: makes the model on a device; random numbers are drawn in it as in one process, so that all processes must
            begin with generators that are the same. For shards it is called with "meta".
        layout: the processes.
        autocast: whether blocks compute under bfloat16 autocast: then their parameters are gathered in bfloat16.
        reshard: whether a block's parameters are given back after the forward pass, and gathered anew for the backward.
        compile: whether to use torch.compile: on the whole model for a process alone, else on each block, between
            which gradients are sent while others are computed.

    Attributes:
        model: with the parameters of this process: DTensors where they are sharded. They have the same names whatever
            the layout.
    """

    def __init__(
        self,
        make: Callable[[Device], Transformer],
        layout: Layout,
        *,
        autocast: bool = False,
        reshard: bool = True,
        compile: bool = False,
    ) -> None:
        self.layout = layout
        self._compiles = compile
        if layout.mode in WITH_SHARDS:
            self.model = _sharded(make, layout, autocast, reshard)
        else:
            self.model = make(layout.device)
        if layout.context_size > 1:
            share_context(self.model, layout.context_group)
        self._forward: Callable[..., Tensor] = self.model
        if compile and layout.is_alone:
            self._forward = torch.compile(self.model)
        elif compile:
            for block in self.model.layers:
                # Of the method, not of the module: FSDP's hooks stay outside of what is traced.
                block.forward = torch.compile(block.forward)
        self._copies: DistributedDataParallel | None = None
        if not layout.is_alone and layout.mode not in WITH_SHARDS:
            devices = [layout.device] if layout.device.type == "cuda" else None
            self._forward = self._copies = DistributedDataParallel(
                self.model, device_ids=devices, gradient_as_bucket_view=True, **_BUFFERS_STAY
            )

    def loss(
        self,
        tokens: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"],
        *,
        count: float,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """What this process's part of the sequences adds to the loss of a step, times the number of processes.

        Gradients are averaged over processes, so those of a step are the gradients of its mean loss, however many
        targets each process has.

        Args:
            tokens: whole sequences, the same on the processes that share them; on any device.
            targets: what follows each, -100 where that does not count.
            count: of the targets of the whole step, over all processes and parts.
            chunk: how many tokens have logits in memory at a time; None for all.
        """
        layout, positions = self.layout, None
        if layout.context_size > 1:
            tokens, targets, positions = share_of(tokens, targets, layout.context_rank, layout.context_size)
            positions = positions.to(layout.device, non_blocking=True)
        tokens, targets = (half.to(layout.device, non_blocking=True) for half in (tokens, targets))
        return self._forward(tokens, positions, targets=targets, chunk=chunk, count=count / layout.size)

    @contextlib.contextmanager
    def part(self, *, last: bool) -> Iterator[None]:
        """Forward and backward pass of a part of a step: gradients are kept, and sent with those of the last part."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        held = self._copies.no_sync() if self._copies is not None and not last else contextlib.nullcontext()
        with held:
            yield

    @contextlib.contextmanager
    def evaluating(self, *, whole: bool = False) -> Iterator[None]:
        """Without gradients, and without compiling for other shapes.

        Args:
            whole: whether the model is called with whole sequences, on every process alike.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._reshard)
            stack.enter_context(torch.no_grad())
            if self._compiles:  # to ask for it otherwise would import the compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if whole:
                stack.enter_context(whole_sequences(self.model))
            yield

    def _reshard(self) -> None:
        """Give back what no backward pass does: what was gathered is out of date after the next update."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _sharded(make: Callable[[Device], Transformer], layout: Layout, autocast: bool, reshard: bool) -> Transformer:
    """A model in shards. Blocks are drawn and sharded one after the other, so that no process ever has all of them.

    With tied embeddings the head's matrix is the embedding's, and both are the root's, which is whole from the first
    layer to the last.
    """
    model = make("meta")
    # What goes into a block is not cast: the residual stream stays in float32 as under autocast alone, and so does what
    # the root has, whose embeddings the stream begins with.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast else None,
        reduce_dtype=torch.float32 if autocast else None,
        cast_forward_inputs=False,
    )
    for part in model.children():
        for block in model.layers if part is model.layers else (part,):
            block.to_empty(device=layout.device)
            reset_parameters(block)
            if part is model.layers:
                fully_shard(block, mesh=layout.mesh, reshard_after_forward=reshard, mp_policy=policy)
    # Needed last in the forward pass and first in the backward pass: gathered once.
    fully_shard(model, mesh=layout.mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy())
    return model
