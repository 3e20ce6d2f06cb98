"""Activation memory: the tensors that autograd saves for the backward pass, with the module and line that save them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .regions import RegionTracker, Statement

_CASTS_AND_VIEWS = ("ToCopyBackward", "TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward")


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor, the first of those that share its storage.

    Attributes:
        bytes: size of the whole storage.
        shape, dtype: of the tensor.
        module: path of the module that saves it.
        statement: source line that saves it.
        of_parameter: whether it is a parameter in another dtype or layout, such as autocast's copy of a weight.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    statement: Statement
    of_parameter: bool


def saved_tensors(forward: Callable[[], object], model: nn.Module, inputs: Iterable[Tensor] = ()) -> list[SavedTensor]:
    """The tensors that ``forward()`` saves for the backward pass, in order; see `torch.autograd.graph`.

    Each storage counts once; those of parameters, buffers and ``inputs`` do not count. A compiled function and a custom
    Function save where they are called, and a checkpointed block saves its inputs. Works on any device.
    """
    # Keeps storages alive: a freed one could give its address to a later one.
    storages = {_address(tensor): tensor for tensor in (*model.parameters(), *model.buffers(), *inputs)}
    saved: list[SavedTensor] = []
    tracker = RegionTracker(model)

    def save(tensor: Tensor) -> Tensor:
        if _address(tensor) not in storages:
            storages[_address(tensor)] = tensor.detach()
            size, where = tensor.untyped_storage().nbytes(), (tracker.current[1], Statement.innermost())
            saved.append(SavedTensor(size, tuple(tensor.shape), tensor.dtype, *where, _is_parameter_copy(tensor)))
        return tensor

    with tracker, torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = forward()
    del output
    return saved


def activation_bytes(saved: Iterable[SavedTensor], module: str = "") -> int:
    """Bytes saved by a module and its submodules, without copies of parameters; by default of the whole model."""
    prefix = f"{module}." if module else ""
    within = [each for each in saved if f"{each.module}.".startswith(prefix)]
    return sum(each.bytes for each in within if not each.of_parameter)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_parameter_copy(tensor: Tensor) -> bool:
    node: Any = tensor.grad_fn
    while node is not None and type(node).__name__.startswith(_CASTS_AND_VIEWS):
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"
