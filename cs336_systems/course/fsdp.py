"""Fully sharded data parallelism: weights, gradients and optimizer state are divided among all processes.

After Rajbhandari et al., "ZeRO" (2020), stage 3, and Zhao et al., "PyTorch FSDP" (2023), with a shard of each weight
instead of one of each block. A layer's weight is gathered when the layer runs, freed after it, and gathered again for
its backward pass, in which the layer's gradient is reduce-scattered. Hooks do all of this; the model is not changed::

    forward      layer 1      layer 2      layer 3         while layer k runs, the weight of k + 1 is gathered;
    gathered     1  2         2  3         3  4            when it is done, that of k + 2 begins to be
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .buckets import GradientAverager
from .collectives import broadcast
from .sharded_weight import ShardedWeight


def is_linear_or_embedding(layer: nn.Module) -> bool:
    """Whether a layer is torch's Linear or Embedding, a subclass, or another class of one of these names, with a matrix
    ``weight``."""
    named = isinstance(layer, (nn.Linear, nn.Embedding)) or type(layer).__name__ in ("Linear", "Embedding")
    weight = getattr(layer, "weight", None)
    return named and isinstance(weight, nn.Parameter) and weight.ndim == 2


class FullyShardedDataParallel(nn.Module):
    """A model of which each process has a part of every large weight, and the gradients and optimizer state of it.

    >>> model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    >>> optimizer = torch.optim.AdamW(model.parameters())  # of the shards
    >>> model(inputs).sum().backward()
    >>> model.finish_gradient_synchronization()
    >>> optimizer.step()

    Weights begin with the values of rank 0. Weights that are tied through layers stay so: they have one shard. Other
    parameters are replicated, and their gradients all-reduced. Gradients of several backward passes add up.

    All processes call the same layers in the same order, forwards and backwards. The order of one forward pass is what
    the next one gathers ahead by. A weight is whole only within its layer's own forward: nothing else may read it.

    Args:
        module: the model, on its device. It is changed: its layers get shards for weights.
        compute_dtype: in which weights are gathered and their layers compute, for which inputs and biases are cast;
            None for the weights' own. Shards, gradients and sums of gradients keep the dtype of the weights.
        shard: chooses the layers whose ``weight`` is sharded.

    Attributes:
        module: the model.
        weights: the sharded weights.

    Raises ValueError if a weight is tied to a parameter of a layer that is not sharded.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], bool] = is_linear_or_embedding,
    ) -> None:
        super().__init__()
        self.module = module
        self._compute_dtype = compute_dtype
        broadcast((tensor, 0) for tensor in itertools.chain(module.parameters(), module.buffers()))
        sharded: dict[Any, ShardedWeight] = {}
        for layer in [layer for layer in module.modules() if shard(layer)]:
            whole: Any = layer.weight
            weight = sharded[whole] = sharded.get(whole) or ShardedWeight(whole, compute_dtype)
            layer.register_parameter("weight", weight.shard)
            layer.register_forward_pre_hook(functools.partial(self._before_forward, weight))
            layer.register_forward_hook(functools.partial(self._after_forward, weight), always_call=True)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter in sharded:
                raise ValueError(f"shard must choose every layer of a tied weight; got none for {name}")
        self.weights = [*sharded.values()]
        shards = {weight.shard for weight in self.weights}
        self._replicated = [parameter for parameter in module.parameters() if parameter not in shards]
        self._averager = GradientAverager(self._replicated, math.inf, overlap=False)
        self._calls: list[ShardedWeight] = []
        self._expected: list[ShardedWeight] = []
        self._in_forward = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        self._expected, self._calls, self._in_forward = self._calls, [], True
        try:
            return self.module(*inputs, **kwargs)
        finally:
            self._in_forward = False
            for weight in self.weights:
                weight.free()

    def _before_forward(self, weight: ShardedWeight, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Hook before a layer's forward: gather the weight, and begin with the next one."""
        if self._in_forward:  # otherwise activation checkpointing calls the layer again
            self._gather_ahead(len(self._calls))
            self._calls.append(weight)
        weight.gather()
        # An attribute of the instance hides the parameter of this name.
        vars(layer)["weight"] = weight.full
        if self._compute_dtype is None:
            return inputs
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter is not weight.shard:
                vars(layer)[name] = parameter.to(self._compute_dtype)
        return tuple(x.to(self._compute_dtype) if _is_floating(x) else x for x in inputs)

    def _after_forward(self, weight: ShardedWeight, layer: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        """Hook after a layer's forward: free the weight until the backward pass arrives at the layer's output.

        If the forward raises, as activation checkpointing does to stop early, there is no output.
        """
        for name, _ in layer.named_parameters(recurse=False):
            vars(layer).pop(name, None)
        if not weight.needed_by_backward:
            weight.free()
        if out is not None and out.requires_grad:
            before = self._calls[-2:-1] if self._in_forward else []
            out.register_hook(functools.partial(self._before_backward, weight, before))
        if self._in_forward:
            self._gather_ahead(len(self._calls))

    def _gather_ahead(self, done: int) -> None:
        """With so many layers done, begin to gather the weights of the next two."""
        for weight in self._expected[done : done + 2]:
            weight.start_gather()

    @staticmethod
    def _before_backward(weight: ShardedWeight, before: list[ShardedWeight], _gradient: Tensor) -> None:
        """Hook before a layer's backward: gather the weight again, and begin with that of the layer before."""
        weight.gather()
        weight.needed_by_backward = True
        for each in before:
            each.start_gather()

    def finish_gradient_synchronization(self) -> None:
        """Wait until ``.grad`` of every parameter is the mean over all processes; call it before the optimizer's step.

        Raises ValueError if a replicated parameter that did not require a gradient at construction has one.
        """
        for weight in self.weights:
            weight.finish_gradient()
            weight.free()
        self._averager.finish()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the model with whole weights; each process calls this, and gets all of it."""
        weights = {id(weight.shard): weight for weight in self.weights}
        state = self.module.state_dict(keep_vars=True)
        return {
            name: weights[id(value)].gathered_shards() if id(value) in weights else value.detach()
            for name, value in state.items()
        }

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients to a norm over all processes, as ``torch.nn.utils.clip_grad_norm_`` clips those of one.

        Call it after `finish_gradient_synchronization`; torch's function would see this process's shards alone.

        Returns:
            The norm before clipping.
        """
        shards = [weight.shard.grad for weight in self.weights if weight.shard.grad is not None]
        others = [parameter.grad for parameter in self._replicated if parameter.grad is not None]
        squares = nn.utils.get_total_norm(shards) ** 2
        if shards:
            dist.all_reduce(squares)
        norm = (squares + nn.utils.get_total_norm(others) ** 2).sqrt() if others else squares.sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm


def _is_floating(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
