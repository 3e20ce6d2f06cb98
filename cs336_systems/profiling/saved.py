"""What autograd keeps for the backward pass, tensor by tensor, with the module and the statement that keep it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .origins import ModulePaths, Origin, statement

_CASTS_AND_VIEWS = ("ToCopyBackward", "TBackward", "TransposeBackward", "PermuteBackward", "ViewBackward")


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is kept, and whose storage no other before it has.

    Attributes:
        bytes: of the whole storage, whatever part of it the tensor is.
        shape, dtype: of the tensor.
        origin: the module and the statement that keep it first; the operation is empty.
        of_parameter: whether it is made of a parameter alone: its copy in autocast's dtype, which is kept once for all
            tokens.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    origin: Origin
    of_parameter: bool


@dataclass(frozen=True)
class OperationBytes:
    """What one statement of one module keeps: its module's path within the one asked for, its text, and bytes."""

    module: str
    source: str
    bytes: int
    tensors: int


def saved_tensors(forward: Callable[[], object], model: nn.Module, inputs: Iterable[Tensor] = ()) -> list[SavedTensor]:
    """What ``forward()`` makes autograd keep (`torch.autograd.graph.saved_tensors_hooks`), in that order.

    Each storage counts once, for the statement that keeps it first; those of the model's parameters and buffers, and of
    ``inputs``, do not count. What a compiled function or a custom Function keeps counts where it is called; what a
    checkpointed block keeps is what goes into it. On any device.
    """
    known = {_address(tensor) for tensor in (*model.parameters(), *model.buffers(), *inputs)}
    # Kept until the end: a storage that was freed could lend its address to the next one.
    kept: list[Tensor] = []
    found: list[SavedTensor] = []
    paths = ModulePaths(model)

    def keep(tensor: Tensor) -> Tensor:
        if _address(tensor) not in known:
            known.add(_address(tensor))
            kept.append(tensor.detach())
            origin = Origin(*statement(), paths.current, "")
            size = tensor.untyped_storage().nbytes()
            found.append(SavedTensor(size, tuple(tensor.shape), tensor.dtype, origin, _is_of_parameter(tensor)))
        return tensor

    with paths.followed(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return found


def activation_bytes(saved: Iterable[SavedTensor], module: str = "") -> int:
    """Bytes kept by a module and those in it, copies of parameters left out; of everything by default."""
    return sum(each.bytes for each in saved if _within(each, module) and not each.of_parameter)


def by_operation(saved: Sequence[SavedTensor], module: str) -> list[OperationBytes]:
    """What each statement of a module, and of those in it, keeps of activations, in the order of the forward pass."""
    groups: dict[tuple[str, str], list[int]] = {}
    for each in saved:
        if _within(each, module) and not each.of_parameter:
            inner = each.origin.module[len(module) :].lstrip(".")
            groups.setdefault((inner, each.origin.source), []).append(each.bytes)
    return [OperationBytes(*key, sum(sizes), len(sizes)) for key, sizes in groups.items()]


def _within(saved: SavedTensor, module: str) -> bool:
    path = saved.origin.module
    return not module or path == module or path.startswith(module + ".")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_of_parameter(tensor: Tensor) -> bool:
    """Whether nothing but casts and views lies between a tensor and a parameter."""
    node: Any = tensor.grad_fn
    while node is not None and type(node).__name__.startswith(_CASTS_AND_VIEWS):
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"
