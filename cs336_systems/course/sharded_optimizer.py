"""Optimizer state sharding: every process has all parameters and gradients, and the optimizer state of some.

After Rajbhandari et al., "ZeRO" (2020), stage 1, in the simple form of the course: each process updates the parameters
that it owns and broadcasts them. AdamW has two float32 moments for each parameter; n processes need 1/n of them each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .collectives import broadcast

_PARAMETERS = ("params", "param_names")


class ShardedOptimizer(Optimizer):
    """Any optimizer that updates each parameter by itself, with its state divided among all processes.

    >>> optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    Gradients have to be the same on all processes, as `DistributedDataParallel` makes them. Parameter groups, options
    of groups and learning-rate schedulers work as with the optimizer itself.

    Args:
        params: parameters or groups of them, in the same order on all processes.
        optimizer_cls: the optimizer, such as ``torch.optim.AdamW``.
        **kwargs: its options.

    Attributes:
        local: the optimizer of the parameters that this process owns.
        owner: for each parameter the rank of the process that updates it. Whole parameters are assigned, the largest
            first, each to the process that owns the fewest elements.
        state: of the parameters that this process owns.
    """

    local: Optimizer | None = None

    def __init__(self, params: Any, optimizer_cls: type[Optimizer], **kwargs: Any) -> None:
        self._make: Callable[[list[dict[str, Any]]], Optimizer] = lambda groups: optimizer_cls(groups, **kwargs)
        self.owner: dict[Tensor, int] = {}
        self._elements = [0] * dist.get_world_size()
        super().__init__(params, kwargs)  # calls add_param_group for each group
        self.defaults = self._local.defaults
        self.state = self._local.state

    @property
    def _local(self) -> Optimizer:
        assert self.local is not None
        return self.local

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and assign them to processes. Raises as torch's method."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._assign(group["params"])
        mine = [parameter for parameter in group["params"] if self.owner[parameter] == dist.get_rank()]
        shard = {**_options(group), "params": mine}
        if self.local is None:
            self.local = self._make([shard])
        else:
            self.local.add_param_group(shard)
        # The optimizer's defaults, which schedulers may change.
        for name, value in self._local.param_groups[-1].items():
            group.setdefault(name, value)

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            least = self._elements.index(min(self._elements))
            self.owner[parameter] = least
            self._elements[least] += parameter.numel() if parameter.requires_grad else 0

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the parameters on their owners, and send them to all processes.

        Args:
            closure: computes the loss and its gradients; called once, before the update.
            **kwargs: for the optimizer's ``step``.

        Returns the closure's result.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for shard, group in zip(self._local.param_groups, self.param_groups, strict=True):
            shard.update(_options(group))
        self._local.step(**kwargs)
        broadcast((parameter, source) for parameter, source in self.owner.items() if parameter.requires_grad)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The options of all groups and the state of the parameters that this process owns: each process saves its own.

        Parameters have the numbers that they would have in the optimizer's own state dict.
        """
        return super().state_dict() | {"shard": [dist.get_rank(), dist.get_world_size()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on the same rank of as many processes, or the whole state dict of the
        optimizer itself, of which the parameters that this process owns are taken.

        Raises ValueError if it is of another process, or does not fit.
        """
        here = [dist.get_rank(), dist.get_world_size()]
        if state_dict.get("shard", here) != here:
            rank, size = state_dict["shard"]
            raise ValueError(f"state_dict must be of rank {here[0]} of {here[1]}; got that of rank {rank} of {size}")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "shard"})
        for parameter in [x for x in self.state if self.owner[x] != here[0]]:
            del self.state[parameter]
        self._local.state = self.state


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _PARAMETERS}
