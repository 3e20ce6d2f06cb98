"""One weight of which each process has consecutive rows, and that is whole only while a layer needs it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .collectives import start_all_gather, start_mean_of_part


class ShardedWeight:
    """A weight (rows, ...), divided along its first axis as evenly as whole rows allow.

    The whole weight is a tensor that always exists and has memory only while it is gathered: its storage is resized to
    nothing in between. So what autograd saves of it for the backward pass takes no memory either, and is there again
    when the weight is gathered again. The gradient arrives at this tensor, and is reduce-scattered from there.

    Collectives need parts of one size: the last ones are padded, with rows that nothing reads.

    Args:
        weight: the same on all processes.
        compute_dtype: of the whole weight; None for the weight's own.

    Attributes:
        shard: the parameter for the optimizer, in the weight's dtype: this process's rows, which may be none.
        full: the tensor for the layer, in the dtype of computation.
        needed_by_backward: whether the backward pass has asked for the weight, and has not got its gradient yet.
    """

    def __init__(self, weight: nn.Parameter, compute_dtype: torch.dtype | None) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        each = -(-len(weight) // size)
        mine = weight.detach()[rank * each : (rank + 1) * each]
        self.shard = nn.Parameter(mine.clone(), requires_grad=weight.requires_grad)
        self._padded = weight.new_empty(size * each, *weight.shape[1:], dtype=compute_dtype)
        # `data` has its own version counter: autograd takes gathering again for no change of what it saved.
        self.full = self._padded.data[: len(weight)].requires_grad_()
        self.full.register_post_accumulate_grad_hook(self._reduce_gradient)
        self.needed_by_backward = False
        self._bytes = self._padded.nbytes
        self._finish_gather: Callable[[], None] | None = None
        self._finish_gradient: Callable[[], Tensor] | None = None
        self.free()

    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory that the whole weight has now."""
        return self.full.untyped_storage().nbytes()

    def start_gather(self) -> None:
        """Start to gather the whole weight, unless it is there."""
        if self.gathered_bytes:
            return
        self.full.requires_grad_(self.shard.requires_grad)
        self.full.untyped_storage().resize_(self._bytes)
        part = _pad(self.shard.detach().to(self.full.dtype), len(self._padded) // dist.get_world_size())
        self._finish_gather = start_all_gather(self._padded, part)

    def gather(self) -> None:
        """Wait until the whole weight is there."""
        self.start_gather()
        if self._finish_gather is not None:
            self._finish_gather()
            self._finish_gather = None

    def free(self) -> None:
        """Free the whole weight."""
        if self._finish_gather is not None:
            self._finish_gather()
            self._finish_gather = None
        self.needed_by_backward = False
        self.full.untyped_storage().resize_(0)

    def gathered_shards(self) -> Tensor:
        """A copy of the whole weight in the dtype of the shards, (rows, ...)."""
        part = _pad(self.shard.detach(), len(self._padded) // dist.get_world_size())
        whole = part.new_empty(self._padded.shape)
        start_all_gather(whole, part)()
        return whole[: len(self.full)]

    def _reduce_gradient(self, full: Tensor) -> None:
        """Autograd calls this with the whole weight when its gradient is complete, so that the weight is not needed."""
        gradient, full.grad = full.grad, None
        assert gradient is not None
        self.free()
        self.finish_gradient()  # of an earlier backward pass
        # In the dtype of the shards: processes add up what they computed in fewer bits.
        self._finish_gradient = start_mean_of_part(_pad(gradient.to(self.shard.dtype), len(self._padded)))

    def finish_gradient(self) -> None:
        """Add this process's rows of the averaged gradient to the shard's, if there has been a backward pass."""
        if self._finish_gradient is None:
            return
        gradient = self._finish_gradient()[: len(self.shard)]
        self._finish_gradient = None
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient


def _pad(tensor: Tensor, rows: int) -> Tensor:
    """A contiguous tensor with so many rows, the last ones zeros."""
    if len(tensor) == rows:
        return tensor.contiguous()
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded
