"""The ways in which data_parallel.py trains a model: as the course builds them, with torch's, and on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.optim import AdamW, Optimizer

from benchmarks.lib.steps import LEARNING_RATE, autocast
from cs336_systems import course
from cs336_systems.parallel import Layout, ParallelModel
from cs336_systems.parallel import layout as layouts
from cs336_systems.transformer import Transformer, TransformerConfig

NONE, NAIVE, FLAT, OVERLAPPED, BUCKETED = "none", "naive", "flat", "overlapped", "bucketed"
SHARDED, FSDP, TORCH_DDP, TORCH_FSDP = "sharded-optimizer", "fsdp", "torch-ddp", "torch-fsdp"
MODES = {
    NONE: "one process, without communication",
    NAIVE: "all-reduces after the backward pass, one for each parameter",
    FLAT: "one all-reduce after the backward pass",
    OVERLAPPED: "an all-reduce for each parameter, within the backward pass",
    BUCKETED: "an all-reduce for each bucket of parameters, within the backward pass",
    SHARDED: f"{OVERLAPPED}, and each process has the optimizer state of its share of the parameters",
    FSDP: "each process has a share of each weight, which its layer gathers",
    TORCH_DDP: "torch's DistributedDataParallel, with its default buckets",
    TORCH_FSDP: "torch's fully_shard, of each block",
}
"""What --parallel can name."""
AFTER_BACKWARD = (NAIVE, FLAT, OVERLAPPED, BUCKETED)
"""Modes that wait for communication after the backward pass alone. The sharded optimizer waits for parameters too, and
shards for weights."""


@dataclass(frozen=True)
class Shares:
    """Of what each process has a share, instead of all of it."""

    parameters: bool = False
    gradients: bool = False
    moments: bool = False

    def state_bytes(self, parameters: int, processes: int) -> dict[str, int]:
        """Bytes of float32 parameters; of these and gradients; of these and AdamW's two moments, as docs/course.md
        counts them, after what they are there: ``init``, ``before_step``, ``after_step``.
        """
        held, sizes = 0, {}
        for stage, copies, shared in zip(STAGES, (1, 1, 2), dataclasses.astuple(self), strict=True):
            held += 4 * copies * parameters // (processes if shared else 1)
            sizes[stage] = held
        return sizes


STAGES = ("init", "before_step", "after_step")
"""When memory is read: the model has been made; just before the optimizer's first step; just after it."""
_ALL = Shares(parameters=True, gradients=True, moments=True)
_SHARES = {SHARDED: Shares(moments=True), FSDP: _ALL, TORCH_FSDP: _ALL}


def shares_of(mode: str) -> Shares:
    """What is shared in a mode of `MODES`."""
    return _SHARES.get(mode, Shares())


def group_mode(mode: str) -> str:
    """The mode of `cs336_systems.parallel` in which the processes start."""
    return {NONE: layouts.NONE, TORCH_FSDP: layouts.FSDP}.get(mode, layouts.DDP)


@dataclass(frozen=True)
class Training:
    """A model in training, on one of the processes.

    Attributes:
        loss: mean cross-entropy of this process's targets.
        finish: waits until gradients are averaged; None if the backward pass waits itself, or there is no group.
        optimizer: AdamW.
    """

    loss: Callable[[Int[Tensor, "batch length"], Int[Tensor, "batch length"]], Float[Tensor, ""]]
    finish: Callable[[], None] | None
    optimizer: Optimizer


def make_training(
    mode: str, config: TransformerConfig, layout: Layout, *, dtype: str, bucket_mb: float | None
) -> Training:
    """The model and its optimizer. Parameters are float32, with values from torch's generator.

    Args:
        mode: of `MODES`.
        dtype: "bfloat16" for autocast, and for weights that `FSDP` gathers in it; or "float32".
        bucket_mb: MiB of gradients in a bucket, for `BUCKETED`.
    """
    half = dtype == "bfloat16"
    if mode in (NONE, TORCH_DDP, TORCH_FSDP):
        parallel = ParallelModel(lambda device: _model(config, device), layout, autocast=half)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            with autocast(layout.device, dtype):
                return parallel.loss(tokens, targets, count=float(targets.numel() * layout.size))

        return Training(loss, None, AdamW(parallel.model.parameters(), lr=LEARNING_RATE, fused=True))
    model = _model(config, layout.device)
    replica: course.DistributedDataParallel | course.FullyShardedDataParallel
    if mode == FSDP:
        replica = course.FullyShardedDataParallel(model, torch.bfloat16 if half else None)
    else:
        replica = course.DistributedDataParallel(
            model, mode=OVERLAPPED if mode == SHARDED else mode, bucket_mb=bucket_mb
        )
    optimizer: Optimizer
    if mode == SHARDED:
        optimizer = course.ShardedOptimizer(replica.parameters(), AdamW, lr=LEARNING_RATE, fused=True)
    else:
        optimizer = AdamW(replica.parameters(), lr=LEARNING_RATE, fused=True)

    def loss_of_replica(tokens: Tensor, targets: Tensor) -> Tensor:
        # FSDP casts what its layers get; autocast would cast the gathered weights once more.
        with autocast(layout.device, "float32" if mode == FSDP else dtype):
            loss: Tensor = replica(tokens, targets=targets, count=float(targets.numel()))
        return loss

    return Training(loss_of_replica, replica.finish_gradient_synchronization, optimizer)


def _model(config: TransformerConfig, device: torch.device | str) -> Transformer:
    return Transformer(config, device=device, dtype=torch.float32)
