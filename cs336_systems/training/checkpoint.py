"""Checkpoints: one file each, which torch.save writes and ``os.replace`` names, so that it is complete or absent.

``step-00000100.pt`` holds the step, and model and optimizer by the names of the parameters, unsharded. So any number of
processes loads what any other number wrote. A step draws no random numbers, so there are no generators to save.
"""

from __future__ import annotations

import dataclasses
import warnings
import zipfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from ..devices import choose_device
from ..files import replacing
from ..parallel import Layout
from ..transformer import Transformer
from .config import TrainingConfig
from .data import Tokenizer, open_tokenizer

CHECKPOINTS, CONFIG = "checkpoints", "config.json"

_FULL = StateDictOptions(full_state_dict=True)
_FULL_ON_CPU = dataclasses.replace(_FULL, cpu_offload=True)  # of several processes, the first receives it


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step-????????.pt"))


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, keep: int, layout: Layout
) -> None:
    """Write a checkpoint, then remove older ones except for the newest `keep`. Every process calls this.

    Raises OSError if the file cannot be written; older checkpoints are then unchanged.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer, options=_FULL_ON_CPU)

    def write() -> None:
        for unfinished in folder.glob(".step-*.part"):
            unfinished.unlink()
        path = folder / f"step-{step:08d}.pt"
        with replacing(path) as file:
            try:
                torch.save({"step": step, "model": model_state, "optimizer": optimizer_state}, file)
            except RuntimeError as error:  # of torch's writer, after the file's own OSError
                raise OSError(f"{path} could not be written: {error.__context__ or error}") from error
        # The run resumed from the newest undamaged file: files of later steps are damaged, and do not count.
        for old in [other for other in checkpoints(folder) if other <= path][:-keep]:
            old.unlink()

    layout.raise_together(lambda: write() if layout.is_main else None)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Load a checkpoint into the model and the optimizer, each process its shards. Returns the step.

    ``weights_only`` admits tensors and plain values alone: a file cannot run code. Raises ValueError if it is not a
    checkpoint, or if its parameters have other names or shapes.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        optimizers = () if optimizer is None else optimizer
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict={} if optimizer is None else state["optimizer"],
            options=_FULL,
        )
        return int(state["step"])
    except Exception as error:  # pickle's, zipfile's and torch's
        raise ValueError(f"{path} must be a checkpoint of this model: {error}") from error


def newest(folder: Path) -> Path:
    """The newest undamaged checkpoint in a folder; ValueError if there is none. A warning names newer damaged files."""
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        if _is_undamaged(path):
            if damaged:
                warnings.warn(f"{', '.join(damaged)} in {folder} is damaged; using {path.name}", stacklevel=2)
            return path
        damaged.append(path.name)
    raise ValueError(f"{folder} must have a checkpoint; got {', '.join(damaged) + ', damaged' if damaged else 'none'}")


def _is_undamaged(path: Path) -> bool:
    """Whether the file matches the CRC-32 checksums that torch.save stores in it."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except Exception:  # zipfile raises many types for damaged headers
        return False


def load_run(folder: str | Path, device: str = "auto") -> tuple[Transformer, Tokenizer]:
    """The model of a run's newest checkpoint, in evaluation mode, and its tokenizer.

    >>> model, tokenizer = load_run("runs/first")
    >>> (tokens,) = generate(model, [list(tokenizer.encode("The "))], 200, temperature=0.8)
    >>> print(tokenizer.decode(tokens))

    Raises ValueError if the folder has no options or no checkpoint of a run.
    """
    folder = Path(folder)
    config = TrainingConfig.load(folder / CONFIG)
    tokenizer = open_tokenizer(config, folder)
    model = Transformer(config.model(tokenizer.size), device=choose_device(device))
    load(newest(folder / CHECKPOINTS), model)
    return model.eval(), tokenizer
