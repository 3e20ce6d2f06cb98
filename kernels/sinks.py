"""Attention sinks: a logit for each head that takes part in the softmax without a value (Xiao et al., 2023)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """The gradient of each head's sink, from the log-sum-exp and delta (*batch, heads, q_len).

    A sink's score gradient is that of a key whose value is 0: weight * (0 - delta), where delta is rowsum(dout * out)
    minus the gradient of the log-sum-exp.
    """
    weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -math.inf, math.inf))
    return -(weights * delta).view(-1, sinks.shape[0], lse.shape[-1]).sum((0, 2)).to(sinks.dtype)
