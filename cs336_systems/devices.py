"""Devices by their names."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """The device of a name, or for "auto" the first of cuda, mps and cpu that is there.

    Raises:
        ValueError: there is no such device.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cuda, cuda:1, mps or cpu; got {name!r}") from None
    if not present.get(device.type, False):
        there = ", ".join(kind for kind, is_there in present.items() if is_there)
        raise ValueError(f"device must be one that torch finds here ({there}); got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device must be one of {torch.cuda.device_count()} GPUs, from cuda:0 on; got {name!r}")
    return device
