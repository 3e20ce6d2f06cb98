"""Data-parallel training as Stanford's CS336 builds it: replicas, a sharded optimizer, and sharded weights.

Each file is short and has a counterpart in torch, which docs/course.md compares it with: `DistributedDataParallel` with
``torch.nn.parallel.DistributedDataParallel``, `ShardedOptimizer` with ``ZeroRedundancyOptimizer``, and
`FullyShardedDataParallel` with ``torch.distributed.fsdp.fully_shard``.
"""

from .ddp import MODES, DistributedDataParallel
from .fsdp import FullyShardedDataParallel, is_linear_or_embedding
from .sharded_optimizer import ShardedOptimizer

__all__ = [
    "MODES",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ShardedOptimizer",
    "is_linear_or_embedding",
]
