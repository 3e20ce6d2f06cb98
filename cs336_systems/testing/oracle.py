"""What results are compared with: attention in float64, and naive in the inputs' own dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..attention import attention
from .evaluation import Results, evaluate
from .features import Features, in_dtype
from .inputs import Inputs


def naive_results(
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    return_lse: bool = True,
) -> Results:
    """Values and gradients of the naive implementation in the dtype of the inputs."""
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
    return evaluate(partial(attention, impl="naive", **settings), inputs, features)


def oracle(
    inputs: Inputs,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    features: Features | None = None,
    return_lse: bool = True,
) -> Results:
    """Values and gradients for these inputs, computed in float64."""
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "return_lse": return_lse}
    return naive_results(inputs.to(torch.float64), features=in_dtype(features or {}, torch.float64), **settings)


def rounding_on(device: torch.device) -> float:
    """How far float32 arithmetic on a device may round each term of a sum: by 2 eps, or 8 eps on a GPU.

    Tensor cores truncate their sums (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), which is a bias,
    where rounding errors cancel. And "flash" multiplies float32 numbers as two parts of 11 bits.
    """
    return (8 if device.type == "cuda" else 2) * torch.finfo(torch.float32).eps
