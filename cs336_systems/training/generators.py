"""The states of this process's generators of random numbers, in a JSON file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def write_random_states(path: Path) -> None:
    """Write the states of the generators of Python, NumPy, torch and every GPU."""
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    states = {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(state) for state in cuda],
    }
    path.write_text(json.dumps(states), encoding="utf-8")


def read_random_states(path: Path) -> None:
    """Put the generators into the states that `write_random_states` wrote. GPUs that were not there then keep theirs.

    Raises:
        ValueError: the file holds something else.
    """
    content = path.read_bytes()
    try:
        states = json.loads(content)
        version, keys, gauss = states["python"]
        random.setstate((version, tuple(keys), gauss))
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, np.uint32), *rest))
        torch.set_rng_state(_tensor(states["torch"]))
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(state), index)
    except (TypeError, KeyError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{path} must hold the states of random generators: {error!r}") from error


def _text(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
