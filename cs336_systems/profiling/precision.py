"""What a dtype costs in precision: sums that lose terms, the dtypes autocast gives, and attention's error.

The errors of attention are measured as the tests measure them: against float64, and beside the budget of
`cs336_systems.testing.budget`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_systems.profiling.containers import tensors_in
from cs336_systems.testing import (
    Attend,
    Features,
    Finding,
    Inputs,
    Results,
    evaluate,
    naive_results,
    oracle,
    roundings,
    terms,
)
from cs336_systems.testing import compare as compare_with_budget

ADDEND = 0.01
ADDITIONS = 1000


@dataclass(frozen=True)
class Accumulation:
    """A way to add up: the dtype of the sum, that of what is added to it, and whether that is cast before."""

    name: str
    accumulator: torch.dtype
    addend: torch.dtype
    cast: bool = False

    def total(self, value: float = ADDEND, count: int = ADDITIONS) -> float:
        """``value``, rounded to the dtype of what is added, ``count`` times added to 0 on the CPU, in order.

        Exact: what is returned is the very number that the accumulator then holds.
        """
        total = torch.tensor(0.0, dtype=self.accumulator)
        for _ in range(count):
            term = torch.tensor(value, dtype=self.addend)
            # The sum keeps its dtype: it is added to in place.
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
"""The four loops of Stanford CS336's assignment, and two of them in bfloat16."""


class ToyModel(nn.Module):
    """Linear, ReLU, LayerNorm, linear: the assignment's model for the dtypes of autocast."""

    def __init__(self, in_features: int = 16, out_features: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x: Float[Tensor, "... in_features"]) -> Float[Tensor, "... out_features"]:
        """Logits."""
        logits: Tensor = self.fc2(self.ln(self.relu(self.fc1(x))))
        return logits


PARAMETER, OUTPUT, RESULT, LOSS = "parameter", "output", "result", "loss"
GRADIENT, GRADIENT_OF_OUTPUT = "gradient", "gradient of output"


@dataclass(frozen=True)
class SeenDtype:
    """The dtype of one tensor of a training step.

    Attributes:
        what: "parameter", "output" (of a module inside the model), "result" (of the model, its logits), "loss",
            "gradient" (of a parameter) or "gradient of output".
        name: of the parameter, or of the module; empty for the model itself and for the loss.
        module: the class that the parameter or output belongs to; empty for the loss.
        dtype: of the tensor.
    """

    what: str
    name: str
    module: str
    dtype: torch.dtype


def dtypes_of(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> list[SeenDtype]:
    """The dtypes of parameters, of what each module returns, of the loss and of the gradients, in one run of the model.

    They are found by hooks, which are removed again, and gradients are not accumulated: the model is left as it was,
    but for what a forward pass changes (running statistics of a BatchNorm).

    Args:
        model: any module, with its parameters on one device.
        inputs: what it is called with: a tuple of arguments, or a single one.
        loss: makes a scalar of what the model returns, under the same autocast; None leaves out loss and gradients.
        autocast: the dtype of `torch.autocast` on the model's device; None for no autocast.

    Returns:
        In order: parameters, outputs as they are made, the model's result, the loss, gradients of outputs as they are
        made, and gradients of parameters. A module that is called again adds nothing but another dtype.

    Raises:
        ValueError: the loss is no scalar, or nothing that it is made of needs a gradient.
    """
    names = {module: name for name, module in model.named_modules()}
    seen: dict[SeenDtype, None] = {}

    def see(what: str, name: str, module: str, tensor: Tensor) -> None:
        seen[SeenDtype(what, name, module, tensor.dtype)] = None

    owners = {id(own): type(module).__name__ for module in names for own in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        see(PARAMETER, name, owners[id(parameter)], parameter)

    def watch(module: nn.Module, arguments: Any, output: Any) -> None:
        name, kind = names[module], type(module).__name__
        for tensor in filter(Tensor.is_floating_point, tensors_in(output)):
            see(RESULT if module is model else OUTPUT, name, kind, tensor)
            if tensor.requires_grad and loss is not None and module is not model:
                tensor.register_hook(partial(see, GRADIENT_OF_OUTPUT, name, kind))

    device = next((tensor.device for tensor in [*model.parameters(), *tensors_in(inputs)]), torch.device("cpu"))
    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(watch).remove)
        with torch.autocast(device.type, autocast) if autocast is not None else nullcontext():
            result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
            found = None if loss is None else loss(result)
        if found is not None:
            _see_gradients(model, found, owners, see)
    return [*seen]


def _see_gradients(
    model: nn.Module, loss: Tensor, owners: Mapping[int, str], see: Callable[[str, str, str, Tensor], None]
) -> None:
    """Compute the gradients of a loss, and see its dtype and theirs."""
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(f"loss must return a scalar that needs gradients; got shape {tuple(loss.shape)}")
    see(LOSS, "", "", loss)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True) if trained else ()
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        if gradient is not None:
            see(GRADIENT, name, owners[id(parameter)], gradient)


@dataclass(frozen=True)
class Reference:
    """What attention should return for some inputs: made once, and compared with any number of implementations.

    Attributes:
        inputs: q, k and v in the dtype that is judged, and the gradients of what is returned.
        exact: computed in float64 from these very numbers.
        naive: by the naive implementation in their own dtype.
        summed: the size of the terms that each result is made of.
        rounded: how far 16-bit roundings in its products are expected to move it.
    """

    inputs: Inputs
    exact: Results
    naive: Results
    summed: Results
    rounded: Results

    @classmethod
    def of(
        cls,
        inputs: Inputs,
        *,
        causal: bool | str = False,
        scale: float | None = None,
        features: Features | None = None,
        return_lse: bool = True,
    ) -> Reference:
        """Compute it; this keeps a dozen float64 matrices of queries × keys at a time.

        Where the device has no float64, as MPS, float64 is the CPU's, from the same numbers.
        """
        settings: dict[str, Any] = {"causal": causal, "scale": scale, "features": features, "return_lse": return_lse}
        wide = Inputs(*(_where_float64_is(x) for x in inputs))
        naive = _results_where_float64_is(naive_results(inputs, **settings))
        return cls(inputs, oracle(wide, **settings), naive, terms(wide, **settings), roundings(wide, **settings))

    def errors_of(self, attend: Attend, *, eps: float | None = None) -> list[Finding]:
        """How far what ``attend`` computes is from float64: out, lse and the gradients, each by norm and by largest.

        Args:
            attend: attention of (q, k, v) with its settings bound, which returns (out, lse), or out alone where the
                reference was made without ``return_lse``.
            eps: what to take for float32's, such as `cs336_systems.testing.TF32_EPS`.

        Raises:
            ValueError: a result is missing, or has another shape or dtype than naive's.
        """
        actual = _results_where_float64_is(evaluate(attend, self.inputs))
        return compare_with_budget(actual, self.exact, self.naive, self.summed, self.rounded, eps=eps)


def _where_float64_is(x: Tensor) -> Tensor:
    return x.cpu() if x.device.type == "mps" else x


def _results_where_float64_is(results: Results) -> Results:
    return {name: _where_float64_is(x) for name, x in results.items()}
