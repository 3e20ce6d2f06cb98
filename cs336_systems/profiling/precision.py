"""Sums in low precision, and the dtypes that autocast chooses. `cs336_systems.testing` has the errors of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .regions import tensors_in


@dataclass(frozen=True)
class Accumulation:
    """A loop that adds up terms of one dtype in an accumulator of another, with or without a cast of each term."""

    name: str
    accumulator: torch.dtype
    addend: torch.dtype
    cast: bool = False

    def total(self, value: float = 0.01, count: int = 1000) -> float:
        """``value``, rounded to the dtype of the terms, added ``count`` times in place on the CPU: the exact sum."""
        total = torch.tensor(0.0, dtype=self.accumulator)
        for _ in range(count):
            term = torch.tensor(value, dtype=self.addend)
            total += term.to(self.accumulator) if self.cast else term
        return total.item()


ACCUMULATIONS = (
    Accumulation("float32", torch.float32, torch.float32),
    Accumulation("float16", torch.float16, torch.float16),
    Accumulation("mixed float16", torch.float32, torch.float16),
    Accumulation("mixed float16, cast", torch.float32, torch.float16, cast=True),
    Accumulation("bfloat16", torch.bfloat16, torch.bfloat16),
    Accumulation("mixed bfloat16", torch.float32, torch.bfloat16),
)
"""The four loops of Stanford CS336's systems assignment, and two in bfloat16."""


@dataclass(frozen=True)
class TensorDtype:
    """The dtype of one tensor of a training step.

    Attributes:
        role: "parameter", "output" (of a submodule), "result" (of the model), "loss", "gradient" (of a parameter) or
            "gradient of output".
        name: of the parameter or of the module; "" for the model and the loss.
        module: class of the module; "" for the loss.
    """

    role: str
    name: str
    module: str
    dtype: torch.dtype


def tensor_dtypes(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> list[TensorDtype]:
    """The dtypes of parameters, outputs, loss and gradients in one step, in the order in which they appear.

    Gradients are not accumulated and hooks are removed. A module that is called again adds only new dtypes.

    Args:
        model: any module with its parameters on one device.
        inputs: a tuple of arguments, or a single one.
        loss: makes a scalar of the model's result, under the same autocast; None for no backward.
        autocast: dtype for `torch.autocast` on the model's device; None for no autocast.

    Raises ValueError if the loss is no scalar, or does not require a gradient.
    """
    names = {module: name for name, module in model.named_modules()}
    owners = {each: type(module).__name__ for module in names for each in module.parameters(recurse=False)}
    seen: dict[TensorDtype, None] = {}

    def see(role: str, name: str, module: str, tensor: Tensor) -> None:
        seen[TensorDtype(role, name, module, tensor.dtype)] = None

    def see_outputs(module: nn.Module, args: Any, output: Any) -> None:
        name, class_name = names[module], type(module).__name__
        for tensor in filter(Tensor.is_floating_point, tensors_in(output)):
            see("result" if module is model else "output", name, class_name, tensor)
            if tensor.requires_grad and loss is not None and module is not model:
                tensor.register_hook(partial(see, "gradient of output", name, class_name))

    for name, parameter in model.named_parameters():
        see("parameter", name, owners[parameter], parameter)
    device = next((tensor.device for tensor in [*model.parameters(), *tensors_in(inputs)]), torch.device("cpu"))
    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_hook(see_outputs).remove)
        with torch.autocast(device.type, autocast) if autocast is not None else nullcontext():
            result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            scalar = None if loss is None else loss(result)
        if scalar is not None:
            if scalar.numel() != 1 or not scalar.requires_grad:
                raise ValueError(f"loss must return a scalar that requires gradients; got shape {tuple(scalar.shape)}")
            see("loss", "", "", scalar)
            trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
            gradients = torch.autograd.grad(scalar, [*trained.values()], allow_unused=True) if trained else ()
            for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
                if gradient is not None:
                    see("gradient", name, owners[parameter], gradient)
    return [*seen]
