"""AdamW, its learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

GRAD_SCALE = "grad_scale"
"""Attribute by which torch's GradScaler passes a divisor of the gradients to fused optimizers."""
CLIP_EPSILON = 1e-6
"""Added to the norm before the limit is divided by it, as in torch.nn.utils.clip_grad_norm_."""


def learning_rate(step: int, highest: float, lowest: float, warmup: int, steps: int) -> float:
    """Linear warm-up, then cosine decay (Loshchilov and Hutter, "SGDR", 2017).

    With t the number of the step, counted from 1, w of `warmup` and T of `steps`::

        t ≤ w:      highest · t / w
        w < t ≤ T:  lowest + (highest − lowest) · (1 + cos(π (t − w) / (T − w))) / 2
    """
    if step <= warmup:
        return highest * step / warmup
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def adamw(model: nn.Module, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """torch's fused AdamW (Loshchilov and Hutter, 2019). Matrices decay; vectors, the gains of norms, do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=learning_rate, betas=betas, fused=True)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors together, on their device; of DTensors, which every process passes, in full."""
    norm = nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None) -> Tensor:
    """Clip the gradients to a global norm (Pascanu et al., 2013), update the parameters, and drop the gradients.

    The fused kernel divides the gradients by `GRAD_SCALE`. Clipping is this division where it can be: one pass over the
    gradients less. On MPS, and for sharded parameters, gradients are clipped before the update.

    Returns:
        The norm before clipping, on the gradients' device. The host does not wait for it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    fused = optimizer.defaults.get("fused") and all(p.device.type in ("cuda", "cpu") for p in parameters)
    if max_norm is None:
        optimizer.step()
    elif fused and not isinstance(norm, DTensor):
        setattr(optimizer, GRAD_SCALE, ((norm.float() + CLIP_EPSILON) / max_norm).clamp(min=1.0))
        try:
            optimizer.step()
        finally:
            delattr(optimizer, GRAD_SCALE)
    else:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
    optimizer.zero_grad()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
