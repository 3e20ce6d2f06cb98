"""What a call asks for besides causality and a scale, and leaves for the gradients of what is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..attention.rules import Scores

Features = Mapping[str, Any]
"""Arguments of `attention` by name. Tensors that require a gradient, also among what ``scores`` captured, get one."""


def leaves_of(features: Features) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The features with new leaves for the tensors that require a gradient, and these by the names of their gradients.

    A gradient is called as its argument is, with a "d" before it: "dbias". What ``scores`` captured is numbered:
    "dscores_0".
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
    """The features with tensors changed, given under their names."""
    mapped: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, Tensor):
            mapped[name] = change(name, value)
        elif isinstance(value, Scores):
            tensors = [change(f"{name}_{number}", tensor) for number, tensor in enumerate(value.tensors)]
            mapped[name] = dataclasses.replace(value, tensors=tuple(tensors))
        else:
            mapped[name] = value
    return mapped
