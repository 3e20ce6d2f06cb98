"""Results and gradients of an implementation, of naive attention, and of the oracle, which is naive in float64."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..attention import attention
from ..attention.rules import Scores
from ..attention.validation import Window
from .inputs import Inputs

Attend = Callable[..., "Tensor | tuple[Tensor, Tensor]"]
"""Attention of q, k, v and features by name, its other arguments bound already: out, or (out, lse)."""
Results = dict[str, Tensor]
"""By name: out, lse if there is one, dq, dk, dv, and the gradients of features (see `leaves_of`)."""
Features = Mapping[str, Any]
"""Arguments of `attention` by name. Tensors that require a gradient, also among what ``scores`` captured, get one."""


class Asked(TypedDict, total=False):
    """The arguments of a call besides its tensors; ``features`` are all but the others of `attention`."""

    causal: bool | str
    window: Window | None
    scale: float | None
    softcap: float | None
    features: Features | None
    return_lse: bool


def evaluate(attend: Attend, inputs: Inputs, features: Features | None = None) -> Results:
    """What ``attend`` returns for these inputs, and the gradients of q, k and v, as the very tensors given.

    And those of the features that require one.
    """
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    given, further = leaves_of(features or {})
    returned = attend(*leaves, **given)
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    gradients = torch.autograd.grad(outputs, (*leaves, *further.values()), (inputs.dout, inputs.dlse)[: len(outputs)])
    values = (*outputs, *[None] * (2 - len(outputs)), *gradients)
    named = zip(("out", "lse", "dq", "dk", "dv", *further), values, strict=True)
    return {name: x.detach() for name, x in named if x is not None}


def leaves_of(features: Features) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The features with new leaves for the tensors that require a gradient, and these by the names of their gradients.

    A gradient has the name of its argument with a "d" before it: "dbias". Those of what ``scores`` captured are
    numbered: "dscores_0".
    """
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves[f"d{name}"] = tensor.detach().requires_grad_()
        return leaves[f"d{name}"]

    return _mapped(features, leaf), leaves


def in_dtype(features: Features, dtype: torch.dtype) -> dict[str, Any]:
    """The same values, floating-point tensors in this dtype."""

    def converted(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    return _mapped(features, converted)


def _mapped(features: Features, change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    mapped: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, Tensor):
            mapped[name] = change(name, value)
        elif isinstance(value, Scores):
            if not all(isinstance(tensor, Tensor) for tensor in value.tensors):
                raise TypeError(f"{name} must be no score_mod that reads tensors at indices that are no axes")
            tensors = [change(f"{name}_{number}", cast("Tensor", x)) for number, x in enumerate(value.tensors)]
            mapped[name] = dataclasses.replace(value, tensors=tuple(tensors))
        else:
            mapped[name] = value
    return mapped


def naive_results(inputs: Inputs, **asked: Unpack[Asked]) -> Results:
    """Values and gradients of the naive implementation in the dtype of the inputs, the log-sum-exp unless not asked."""
    settings = {name: value for name, value in asked.items() if name != "features"}
    attend = partial(attention, impl="naive", **{"return_lse": True, **settings})
    return evaluate(attend, inputs, asked.get("features"))


def oracle(inputs: Inputs, **asked: Unpack[Asked]) -> Results:
    """Values and gradients for these inputs, computed in float64."""
    asked["features"] = in_dtype(asked.get("features") or {}, torch.float64)
    return naive_results(inputs.to(torch.float64), **asked)


def rounding_on(device: torch.device) -> float:
    """How far float32 arithmetic on a device may round each term of a sum: by 2 eps, or 8 eps on a GPU.

    Tensor cores truncate their sums (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), which is a bias,
    where rounding errors cancel. And "flash" multiplies float32 numbers as two halves of 11 bits.
    """
    return (8 if device.type == "cuda" else 2) * torch.finfo(torch.float32).eps


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, memory that torch hands out uninitialised is full of NaN, so that results nobody wrote are seen."""
    deterministic: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # Filling is all that is wanted: what is not deterministic may stay so.
            warnings.filterwarnings("ignore", message="(?s).*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = filled
