"""AdamW, its learning rate as a function of the step, and the limit of the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FUSED_ON = ("cuda", "cpu", "mps")
"""Where torch updates all parameters by one kernel."""
_SCALES_ON = ("cuda", "cpu")
"""Where that kernel also divides the gradients by a number on the device."""
_SCALE = "grad_scale"
"""The attribute by which torch's GradScaler gives an optimizer that number."""
_ABOVE_ZERO = 1e-6
"""Added to a norm before the limit is divided by it, as torch does it."""


def learning_rate(step: int, *, highest: float, lowest: float, warmup: int, steps: int) -> float:
    """The learning rate of an update: a linear warm-up, then a cosine (Loshchilov and Hutter, "SGDR", 2017).

    With t the number of the update, counted from 1, w of `warmup` and T of `steps`::

        t ≤ w:      highest · t / w
        w < t ≤ T:  lowest + (highest − lowest) · (1 + cos(π (t − w) / (T − w))) / 2
        t > T:      lowest

    Raises:
        ValueError: ``step`` is below 1.
    """
    if step < 1:
        raise ValueError(f"step must be at least 1; got {step}")
    if step <= warmup:
        return highest * step / warmup
    if step > steps:
        return lowest
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: matrices, embeddings among them, decay; vectors, which are the gains of norms, do not.

    Decay pulls a gain towards 0, where it would switch its channel off; a matrix it keeps small, which the norm after
    it makes up for.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def adamw(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """torch's AdamW (Loshchilov and Hutter, 2019), fused where the device has that; the model is on its device."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        parameter_groups(model, weight_decay), lr=learning_rate, betas=betas, fused=device in FUSED_ON
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next update, of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(parameters: Iterable[Tensor], limit: float | None) -> Tensor:
    """Scale the gradients so that their global norm is at most `limit` (Pascanu et al., 2013); None for no limit.

    Of sharded parameters every process calls this; the norm is that of all shards together.

    Returns:
        The norm that they had, as a tensor on their device, so that nothing waits for it.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if limit is None:
        return total_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    return _whole(nn.utils.clip_grad_norm_(trained, limit))


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The norm of all tensors together, on their device; of shards, which every process passes, that of the whole."""
    return _whole(nn.utils.get_total_norm(tensors))


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def update(optimizer: torch.optim.Optimizer, model: nn.Module, limit: float | None) -> Tensor:
    """Limit the gradients as `clip` does, update the parameters, and drop the gradients.

    torch's fused kernel limits them itself, by the division that it has for ``GradScaler``: 4 bytes a parameter fewer
    are read. Shards, and optimizers that are not fused, have them limited first.

    Returns:
        The norm that the gradients had, as `clip` does.
    """
    parameters = [*model.parameters()]
    divides = optimizer.defaults.get("fused") and all(
        parameter.device.type in _SCALES_ON and not isinstance(parameter, DTensor) for parameter in parameters
    )
    if limit is None or not divides:
        norm = clip(parameters, limit)
        optimizer.step()
    else:
        norm = clip(parameters, None)
        setattr(optimizer, _SCALE, ((norm.float() + _ABOVE_ZERO) / limit).clamp(min=1.0))
        try:
            optimizer.step()
        finally:
            delattr(optimizer, _SCALE)
    optimizer.zero_grad()
    return norm
