"""Attention, written so that it can be read, measured and trusted.

- `cs336_systems.attention`: what to import to compute attention.
- `cs336_systems.transformer`: a language model around it.
- `cs336_systems.training`: to train one on text files.
- `cs336_systems.parallel`: several GPUs, which share its parameters, its batch, and its sequences.
- `cs336_systems.compat`: the same under the names that torch, flash_attn and transformers have for it.
- `cs336_systems.profiling`: how to time it and account for its memory.
- ``cs336_systems.kernels``: the Triton kernels and their launchers, which the others call.

Importing this package alone imports none of them, and not torch.
"""

from importlib import metadata

try:
    # By this name, which a link to the package may change: another package called cs336_systems has another version.
    __version__ = metadata.version(__name__)
except metadata.PackageNotFoundError:
    # A checkout on the path that was never installed: its version is not known here, so none is made up.
    __version__ = "0+uninstalled"

__all__ = ["__version__"]
