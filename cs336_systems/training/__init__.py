"""Training of `cs336_systems.transformer` on text files: `python -m cs336_systems.training --help`."""

from .checkpoint import load_run
from .config import TrainingConfig
from .loop import Trainer

__all__ = ["Trainer", "TrainingConfig", "load_run"]
