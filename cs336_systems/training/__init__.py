"""Training of `cs336_systems.transformer` on text files: `python -m cs336_systems.training --help`."""

from .config import TrainingConfig
from .estimate import MemoryEstimate, estimate_memory
from .loop import Trainer
from .prepare import load_run, prepare

__all__ = ["MemoryEstimate", "Trainer", "TrainingConfig", "estimate_memory", "load_run", "prepare"]
