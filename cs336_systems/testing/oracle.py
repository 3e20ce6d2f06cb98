"""What results are compared with: attention in float64, and naive in the inputs' own dtype."""

from __future__ import annotations

from functools import partial

import torch
from typing_extensions import Unpack

from ..attention import attention
from .evaluation import Asked, Results, evaluate, in_dtype
from .inputs import Inputs


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
