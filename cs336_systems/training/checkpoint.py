"""Checkpoints that are there whole or not at all, and from which a run goes on to the bit.

Model and optimizer are written by torch.distributed.checkpoint, in the layout-free form of
``torch.distributed.checkpoint.state_dict``: parameters by their names, whatever wraps or shards them. One process
writes and reads it as many do, each its own shards, and what one layout wrote another can read; safetensors would need
all of it gathered in one place. Around it, in one folder ``step-00000100``:

==================  ====================================================================================
``*.distcp``        shards of the tensors; ``.metadata`` says where which of them lie
``random-0.pt``     the generators of process 0: Python's, NumPy's, torch's, and each GPU's
``state.json``      the step, a hash of the training tokens, and the size of every other file; written last
==================  ====================================================================================

The folder is written under a name that begins with a dot, brought to disk, and renamed. A folder without a
``state.json``, or with a file that has not the size noted there, is passed over.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_states
from torch.distributed.checkpoint.state_dict_saver import save as write_states

from ..files import sync_file, sync_folder, write_text

STATE = "state.json"
_PREFIX = "step-"


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: updates made. The position in the data follows from it: see `data`.
        data: a hash of the training tokens; another one would be another order.
    """

    step: int
    data: str


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int,
    rank: int = 0,
) -> Path:
    """Write a checkpoint into `folder`, then remove all but the newest `keep`; every process calls this.

    Returns:
        The checkpoint's folder. One of the same step that is whole is left as it is.
    """
    target = folder / f"{_PREFIX}{progress.step:08d}"
    part = folder / f".{target.name}.part"
    if is_whole(target):
        return target
    if rank == 0:
        for unfinished in folder.glob(f".{_PREFIX}*.part"):
            shutil.rmtree(unfinished)
        part.mkdir(parents=True)
    _barrier()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with _one_process_is_meant():
        write_states(states, checkpoint_id=part)
    torch.save(random_states(), part / f"random-{rank}.pt")
    _barrier()
    if rank == 0:
        files = sorted(part.iterdir())
        for file in files:
            sync_file(file)
        sizes = {file.name: file.stat().st_size for file in files}
        write_text(part / STATE, json.dumps({**dataclasses.asdict(progress), "files": sizes}, indent=1) + "\n")
        if target.exists():  # it is not whole
            shutil.rmtree(target)
        part.rename(target)
        sync_folder(folder)
        for old in checkpoints(folder)[:-keep]:
            # Renamed first, so that a removal that is cut short leaves nothing that looks like a checkpoint.
            shutil.rmtree(old.rename(folder / f".{old.name}.part"))
    _barrier()
    return target


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank: int = 0) -> None:
    """Put a checkpoint's values into the model and, if it is given, the optimizer and this process's generators.

    A process that the run did not have before keeps its generators as they are.

    Raises:
        ValueError: the checkpoint is not whole, or its parameters have other names or shapes than the model's.
    """
    if not is_whole(checkpoint):
        raise ValueError(f"checkpoint must be a whole checkpoint; got {checkpoint}")
    optimizers = () if optimizer is None else optimizer
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
    if optimizer is None:
        del states["optimizer"]
    try:
        with _one_process_is_meant():
            read_states(states, checkpoint_id=checkpoint)
    except (RuntimeError, CheckpointException) as error:
        raise ValueError(f"checkpoint must be one of this model; {checkpoint} does not fit: {error}") from error
    set_state_dict(model, optimizers, model_state_dict=states["model"], optim_state_dict=states.get("optimizer", {}))
    generators = checkpoint / f"random-{rank}.pt"
    if optimizer is not None and generators.exists():
        set_random_states(torch.load(generators, weights_only=True))


def read_progress(checkpoint: Path) -> Progress:
    """How far the run of a whole checkpoint was."""
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return Progress(step=state["step"], data=state["data"])


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, the oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if is_whole(path))


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def is_whole(checkpoint: Path) -> bool:
    """Whether all files of a checkpoint are there, at their full sizes."""
    try:
        sizes = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError):
        return False


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch and every GPU, as values that load without pickled code."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` gave. GPUs that were not there then keep their states."""
    random.setstate(states["python"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, index)


def _barrier() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """torch warns each time that it assumes a single process where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
