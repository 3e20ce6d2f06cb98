"""The states of this process's generators of random numbers, as values for JSON."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and every GPU."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` gave. GPUs that were not there then keep their states.

    Raises:
        ValueError: a state is none.
    """
    try:
        version, keys, gauss = states["python"]
        random.setstate((version, tuple(keys), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        torch.set_rng_state(_tensor(states["torch"]))
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), index)
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"states must be those of random generators: {error!r}") from error


def _text(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
