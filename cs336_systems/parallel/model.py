"""One model that several processes train: replicated or sharded, with whole or divided sequences."""

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

from ..transformer import Transformer
from ..transformer.model import reset_parameters
from .context import share_context, whole_sequences
from .layout import WITH_SHARDS, Layout
from .zigzag import zigzag_shard

MakeModel = Callable[[torch.device | str], Transformer]

# The only buffer, RoPE's table, never changes. torch 2.13 renames the option.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False
}


class ParallelModel:
    """A model that several processes train, with the loss and gradients of one process, but for rounding.

    Replicas all-reduce their gradients (DistributedDataParallel). Shards (FSDP2, after Rajbhandari et al., "ZeRO",
    2020) all-gather a block's parameters before it computes, and reduce-scatter its gradients after it. Both average
    over all processes, whether these have different sequences or parts of the same ones.

    Args:
        make: makes the model on a device, with parameters from torch's generator, which must have the same state on all
            processes. For shards it is called with "meta".
        layout: the processes.
        autocast: whether blocks compute under bfloat16 autocast: then their parameters are gathered in bfloat16.
        reshard: whether a block's parameters are freed after the forward pass and gathered again for the backward.
        compile: whether to use torch.compile: for the whole model of a single process, else for each block, so that
            communication of one overlaps with computation of another.

    Attributes:
        model: the parameters of this process, DTensors if sharded. Their names do not depend on the layout.
    """

    def __init__(
        self,
        make: MakeModel,
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
        if compile and not layout.is_distributed:
            self._forward = torch.compile(self.model)
        elif compile:
            for block in self.model.layers:
                # The method, not the module: FSDP's hooks stay outside of the compiled code.
                block.forward = torch.compile(block.forward)
        self._replica: DistributedDataParallel | None = None
        if layout.is_distributed and layout.mode not in WITH_SHARDS:
            devices = [layout.device] if layout.device.type == "cuda" else None
            self._forward = self._replica = DistributedDataParallel(
                self.model, device_ids=devices, gradient_as_bucket_view=True, **_NO_BUFFERS
            )

    def loss(
        self,
        tokens: Int[Tensor, "batch length"],
        targets: Int[Tensor, "batch length"],
        *,
        count: float,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """This process's share of a step's mean loss, times the number of processes.

        Gradients are averaged over processes, so those of a step are the gradients of its mean loss, however many
        targets each process has.

        Args:
            tokens: full sequences, the same on processes that share them; on any device.
            targets: the next token of each, -100 where it does not count.
            count: number of targets of the whole step, over all processes and micro-batches.
            chunk: tokens whose logits are in memory at a time; None for all.
        """
        layout, positions = self.layout, None
        if layout.context_size > 1:
            tokens, targets, positions = zigzag_shard(tokens, targets, layout.context_rank, layout.context_size)
            positions = positions.to(layout.device, non_blocking=True)
        tokens, targets = (x.to(layout.device, non_blocking=True) for x in (tokens, targets))
        return self._forward(tokens, positions, targets=targets, chunk=chunk, count=count / layout.size)

    @contextlib.contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward pass of a micro-batch: gradients accumulate, and are reduced with the last one's."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        no_sync = self._replica.no_sync() if self._replica is not None and not last else contextlib.nullcontext()
        with no_sync:
            yield

    @contextlib.contextmanager
    def evaluating(self, *, whole: bool = False) -> Iterator[None]:
        """No gradients, and no compilation for other shapes.

        Args:
            whole: whether every process calls the model with full sequences, the same ones.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._reshard)
            stack.enter_context(torch.no_grad())
            if self._compiles:  # otherwise this would import the compiler
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if whole:
                stack.enter_context(whole_sequences(self.model))
            yield

    def _reshard(self) -> None:
        """Free gathered parameters, which a backward pass would do: the next update makes them stale."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _sharded(make: MakeModel, layout: Layout, autocast: bool, reshard: bool) -> Transformer:
    """A sharded model. Blocks are initialised and sharded one by one, so that no process ever holds all of them.

    The root has the embedding, the last norm and the head, so that tied embeddings are gathered once.
    """
    model = make("meta")
    # A block's input is not cast: as under autocast alone, the residual stream stays in float32, and so does the root.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if autocast else None,
        reduce_dtype=torch.float32 if autocast else None,
        cast_forward_inputs=False,
    )
    for child in model.children():
        for module in model.layers if child is model.layers else (child,):
            module.to_empty(device=layout.device)
            reset_parameters(module)
            if child is model.layers:
                fully_shard(module, mesh=layout.mesh, reshard_after_forward=reshard, mp_policy=policy)
    # Used last in the forward pass and first in the backward pass: gathered once.
    fully_shard(model, mesh=layout.mesh, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy())
    return model
