"""Checkpoints that are there whole or not at all, and from which a run goes on to the bit.

Model and optimizer are written by torch.distributed.checkpoint, in the layout-free form of
``torch.distributed.checkpoint.state_dict``: parameters by their names, whatever wraps or shards them. One process
writes and reads it as many do, each its own shards, and what one layout wrote another can read; safetensors would need
all of it gathered in one place. No file is a pickle. In one folder ``step-00000100``:

==================  ====================================================================================
``tensors-0.bin``   what process 0 wrote of the tensors; ``tensors.json`` says where each lies: see `storage`
``random-0.json``   the generators of process 0: Python's, NumPy's, torch's, and each GPU's
``state.json``      the step, a hash of the training tokens, the size and the SHA-256 of every other file, and a SHA-256
                    of its other fields; written last
==================  ====================================================================================

The folder is written under a name that begins with a dot, brought to disk, and renamed. A checkpoint is whole when
``state.json`` is, to the byte, what `save` writes for its fields, and every file has the size and the checksum noted
there.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as read_states
from torch.distributed.checkpoint.state_dict_saver import save as write_states

from ..files import sync_file, sync_folder, write_text
from ..parallel import Layout
from .generators import read_random_states, write_random_states
from .integrity import (
    FORMAT,
    PREFIX,
    STATE,
    Checkpoint,
    Entry,
    Progress,
    checkpoints,
    entry_of,
    is_whole,
    latest,
    rendered,
    step_of,
)
from .storage import INDEX, TensorReader, TensorWriter, tensor_file

__all__ = ["Checkpoint", "Progress", "checkpoints", "is_whole", "latest", "load", "save"]

_ALONE = Layout(torch.device("cpu"))


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    *,
    keep: int,
    layout: Layout = _ALONE,
) -> Path:
    """Write a checkpoint into `folder`, then remove older ones but for the newest `keep`; every process calls this.

    Returns:
        The checkpoint's folder. One of the same step that is whole is left as it is.

    Raises:
        OSError: a file could not be written, in some process; the older checkpoints are as they were.
    """
    target = folder / f"{PREFIX}{progress.step:08d}"
    part = folder / f".{target.name}.part"
    if not layout.gathered(layout.together(lambda: layout.is_main and _begin(target, part)))[0]:
        return target
    try:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        with _torch_errors():
            # The optimizer's settings come from the run's options.
            write_states(
                {"model": model_state, "optimizer": optimizer_state["state"]}, storage_writer=TensorWriter(part)
            )
        entries = layout.gathered(layout.together(lambda: _finish_own_files(part, layout)))
        files = {name: entry for of_a_process in entries for name, entry in of_a_process.items()}
        layout.together(lambda: _publish(part, target, progress, files, keep) if layout.is_main else None)
    except OSError:
        if layout.is_main:
            shutil.rmtree(part, ignore_errors=True)
        raise
    return target


def _begin(target: Path, part: Path) -> bool:
    """Make the folder to write into; False if the checkpoint is there already."""
    if target.exists() and is_whole(target):
        return False
    for unfinished in target.parent.glob(f".{PREFIX}*.part"):
        shutil.rmtree(unfinished)
    part.mkdir(parents=True)
    return True


def _finish_own_files(part: Path, layout: Layout) -> dict[str, Entry]:
    """Bring the files of this process to disk; the size and the checksum of each."""
    generators = _generators_file(layout.rank)
    write_random_states(part / generators)
    names = [tensor_file(layout.rank), generators, *([INDEX] if layout.is_main else [])]
    for name in names:
        sync_file(part / name)
    return {name: entry_of(part / name) for name in names}


def _publish(part: Path, target: Path, progress: Progress, files: dict[str, Entry], keep: int) -> None:
    """Complete the checkpoint, give it its name, and remove the oldest ones."""
    write_text(part / STATE, rendered({"format": FORMAT, "step": progress.step, "data": progress.data, "files": files}))
    if target.exists():  # it is not whole
        shutil.rmtree(target)
    part.rename(target)
    sync_folder(target.parent)
    # Those of later steps are damaged, or the run would have gone on from them; they do not count.
    earlier = [path for path in checkpoints(target.parent) if step_of(path) <= progress.step]
    for old in earlier[:-keep]:
        # Renamed first, so that a removal that is cut short leaves nothing that looks like a checkpoint.
        shutil.rmtree(old.rename(target.parent / f".{old.name}.part"))


def load(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, rank: int = 0
) -> None:
    """Put a checkpoint's values into the model and, if it is given, the optimizer and this process's generators.

    The optimizer keeps its settings: learning rate, averages' factors, decay. A process that the run did not have
    before keeps its generators as they are.

    Raises:
        ValueError: the checkpoint's parameters have other names or shapes than the model's.
    """
    path, optimizers = checkpoint.path, () if optimizer is None else optimizer
    model_state, optimizer_state = get_state_dict(model, optimizers)
    states = {"model": model_state} | ({} if optimizer is None else {"optimizer": optimizer_state["state"]})
    reader = TensorReader(path, checkpoint.files)
    try:
        with _torch_errors():
            read_states(states, storage_reader=reader)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"checkpoint must be one of this model; {path} does not fit: {error}") from error
    set_state_dict(model, optimizers, model_state_dict=model_state, optim_state_dict=optimizer_state)
    generators = _generators_file(rank)
    if optimizer is not None and generators in checkpoint.files:
        read_random_states(path / generators)


def _generators_file(rank: int) -> str:
    return f"random-{rank}.json"


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise the first failure itself, which torch wraps, and leave out its warning that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            _, (failure, _) = min(error.failures.items())
            raise failure from None
